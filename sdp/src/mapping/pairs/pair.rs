//! One pair of a name and an address, as one endpoint learned it.

use dns_policy::{boot_time::BootTime, mapping::Mapping};

use super::{Source, UNSETTLED_SECS, acknowledged::Acknowledged};
use crate::mapping::holdings::Serial;

/// The state in which a pair was sent to an agent, and which the agent acknowledges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AgentAck {
    /// Time at which the answer with the pair was seen.
    pub seen: BootTime,
    /// Time until which the pair counts.
    pub until: BootTime,
}

impl AgentAck {
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            seen: self.seen.max(other.seen),
            until: self.until.max(other.until),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Pair {
    /// Distinguishes the pair from an earlier pair with the same key.
    pub(super) serial: Serial,
    /// Time of the latest answer.
    pub(super) seen_at: BootTime,
    pub(super) ttl: u32,
    pub(super) expires: BootTime,
    /// What an agent has made durable: the latest time and the latest expiry of the answers that
    /// were sent to it. They may come from two answers, because each answer is sent unchanged.
    pub(super) durable: AgentAck,
    /// Acknowledgement of an agent without leases.
    pub(super) acknowledged: Acknowledged,
    pub(super) tries: u8,
    /// Time until which the pair counts on a disk, the agent's or the journal's.
    pub(super) written: BootTime,
    /// The latest `seen_at` that is on a disk.
    pub(super) seen_written: BootTime,
}

impl Pair {
    pub(super) fn new(
        mapping: &Mapping,
        expires: BootTime,
        source: Source,
        serial: Serial,
    ) -> Self {
        let on_disk = |instant| match source {
            Source::Journal => instant,
            Source::Answer | Source::Leased => BootTime::START,
        };
        Self {
            serial,
            seen_at: mapping.seen_at,
            ttl: mapping.ttl,
            expires,
            durable: AgentAck::default(),
            acknowledged: Acknowledged::default(),
            tries: 0,
            written: on_disk(expires),
            seen_written: on_disk(mapping.seen_at),
        }
    }

    /// Merges two answers: the later `seen_at` and the later expiry count. So the later answer
    /// reopens a pair that an agent removed on purpose (`fqdn cache clean`) before that answer.
    pub(super) fn merged(self, fresh: Self) -> Self {
        let (longer, shorter) = if self.expires <= fresh.expires {
            (fresh, self)
        } else {
            (self, fresh)
        };
        let mut merged = longer;
        if shorter.seen_at > longer.seen_at {
            merged.seen_at = shorter.seen_at;
            merged.ttl = seconds_between(merged.seen_at, merged.expires);
        }
        merged.serial = self.serial;
        merged.acknowledged = self.acknowledged;
        merged.durable = self.durable.and(fresh.durable);
        merged.written = self.written.max(fresh.written);
        merged.seen_written = self.seen_written.max(fresh.seen_written);
        merged
    }

    /// Seconds from the last answer to the end.
    pub(super) fn lasts(&self) -> u32 {
        seconds_between(self.seen_at, self.expires)
    }

    pub(super) fn is_settled(&self) -> bool {
        self.expires <= self.durable.until && self.seen_at <= self.durable.seen
    }

    /// Whether no agent has ever made the pair durable, in any state.
    pub(super) fn is_new(&self) -> bool {
        self.durable == AgentAck::default()
    }

    /// Time until which the pair is stored.
    pub(super) fn until(&self) -> BootTime {
        if self.is_settled() {
            self.expires
        } else {
            self.expires.plus_secs(UNSETTLED_SECS)
        }
    }

    /// Records that a disk has the pair with its present time and expiry.
    pub(super) fn note_written(&mut self) {
        self.written = self.written.max(self.expires);
        self.seen_written = self.seen_at;
    }
}

/// Seconds between two instants, rounded up: a pair that is sent again must not end sooner.
fn seconds_between(from: BootTime, to: BootTime) -> u32 {
    let seconds = to
        .nanos()
        .saturating_sub(from.nanos())
        .div_ceil(1_000_000_000);
    u32::try_from(seconds).unwrap_or(u32::MAX)
}
