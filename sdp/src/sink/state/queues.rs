//! Everything that waits to be sent to the agent.

use std::time::Duration;

use dns_policy::{
    boot_time::BootTime,
    mapping::{Mapping, Realised},
};

use super::Calls;
use crate::{
    mapping::{OnRealised, pairs::Key},
    query_report::QueryReport,
    sink::{
        delayed_names::DelayedNames,
        turns::{Names, Turns},
    },
};

/// Maximum number of held answers in the queue. Each endpoint has a share of it. Above it, answers
/// are released as if the agent were away.
const MAX_HELD: usize = 16_384;
/// Maximum number of answers that were released at once and wait to be sent with their other data
/// for the agent. Each endpoint has a share of it.
const MAX_RELEASED: usize = 4096;
/// Time for which refreshes of one name are collected, to be sent together.
const REFRESH_AFTER: Duration = Duration::from_millis(500);
/// Time for which refreshes of a name are collected if the agent has acknowledged its pairs.
const RENEW_AFTER: Duration = Duration::from_secs(3);

/// An answer that a client waits for.
pub(in crate::sink) struct Waiting {
    pub(super) mapping: Mapping,
    pub(super) report: Option<Box<QueryReport>>,
    pub(super) since: BootTime,
    pub(super) on_realised: OnRealised,
}

/// An answer that was released at once, and its other data for the agent.
pub(super) struct ReleasedAnswer {
    pub(super) mapping: Mapping,
    pub(super) report: Box<QueryReport>,
}

pub(in crate::sink) struct Queues {
    pub(super) live: Turns<Waiting>,
    pub(super) released: Turns<ReleasedAnswer>,
    pub(super) refreshes: DelayedNames,
    /// Names whose answers were released because the agent had acknowledged their pairs.
    pub(super) renewals: DelayedNames,
    pub(super) replays: Names,
    /// Names to replay from the next tick on.
    pub(super) retries: Vec<Key>,
}

impl Default for Queues {
    fn default() -> Self {
        Self {
            live: Turns::new(MAX_HELD),
            released: Turns::new(MAX_RELEASED),
            refreshes: DelayedNames::new(REFRESH_AFTER),
            renewals: DelayedNames::new(RENEW_AFTER),
            replays: Names::new(usize::MAX),
            retries: Vec::new(),
        }
    }
}

impl Queues {
    pub(in crate::sink) fn len(&self) -> usize {
        self.live.len()
            + self.released.len()
            + self.refreshes.len()
            + self.renewals.len()
            + self.replays.len()
    }

    /// Whether something that no client waits for is due at `at`.
    pub(super) fn has_others(&self, at: BootTime) -> bool {
        !self.replays.is_empty()
            || !self.released.is_empty()
            || self.refreshes.is_due(at)
            || self.renewals.is_due(at)
    }

    /// The next name to refresh or renew that is due at `at`.
    pub(super) fn pop_due(&mut self, at: BootTime) -> Option<Key> {
        self.refreshes.pop(at).or_else(|| self.renewals.pop(at))
    }

    /// Whether there is something to send, once there is room.
    pub(in crate::sink) fn is_ready(&self) -> bool {
        !self.live.is_empty() || self.has_released() || !self.replays.is_empty()
    }

    /// Whether answers that were released at once wait to be sent.
    pub(in crate::sink) fn has_released(&self) -> bool {
        !self.released.is_empty()
    }

    /// Replays these names, and drops the earlier ones.
    pub(super) fn replay(&mut self, keys: impl IntoIterator<Item = Key>) {
        self.replays.clear();
        self.retries.clear();
        for key in keys {
            self.replays.push(key);
        }
    }

    /// Queues for replay the names that are to be tried again.
    pub(in crate::sink) fn retry(&mut self) {
        for key in self.retries.drain(..) {
            self.replays.push(key);
        }
    }

    /// Drops everything. The answers that clients wait for are added to `calls`.
    pub(super) fn clear(&mut self, calls: &mut Calls) {
        self.released.take_while(|_| true);
        self.refreshes.clear();
        self.renewals.clear();
        self.replay([]);
        let waiting = self.live.take_while(|_| true).into_iter();
        calls.extend(waiting.map(|waiting| (waiting.on_realised, Realised::AgentAway)));
    }
}
