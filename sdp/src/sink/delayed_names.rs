//! Names that are sent some time after they were queued, so that one message has all new data of a
//! name.

use std::time::Duration;

use dns_policy::boot_time::BootTime;

use super::turns::Names;
use crate::mapping::pairs::Key;

/// Maximum number of queued names of all endpoints together. Each endpoint has a share of it.
const LIMIT: usize = 32_768;

pub(super) struct DelayedNames {
    names: Names,
    /// Time at which the first of the queued names was queued.
    since: Option<BootTime>,
    after: Duration,
}

impl DelayedNames {
    /// A queue in which each name waits for at most `after`.
    pub(super) fn new(after: Duration) -> Self {
        Self {
            names: Names::new(LIMIT),
            since: None,
            after,
        }
    }

    /// Queues a name once. If there is no room, the name is sent with the next replay.
    pub(super) fn push(&mut self, key: Key, now: BootTime) {
        if self.names.push(key) {
            self.since.get_or_insert(now);
        }
    }

    /// Whether the first name has waited long enough by `now`.
    pub(super) fn is_due(&self, now: BootTime) -> bool {
        self.since
            .is_some_and(|since| now >= since.plus(self.after))
    }

    /// The next name, if the names are due.
    pub(super) fn pop(&mut self, now: BootTime) -> Option<Key> {
        if !self.is_due(now) {
            return None;
        }
        let key = self.names.pop()?;
        if self.names.is_empty() {
            self.since = None;
        }
        Some(key)
    }

    pub(super) fn len(&self) -> usize {
        self.names.len()
    }

    pub(super) fn clear(&mut self) {
        self.names.clear();
        self.since = None;
    }
}
