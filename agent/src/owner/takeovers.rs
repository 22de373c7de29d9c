//! The takeovers of a node since it booted, and the brake against takeovers in a loop.
//!
//! Times are of the clock that counts from the boot, so that a change of the wall clock changes nothing.

use std::{collections::VecDeque, time::Duration};

use daemon::label;
use dns_policy::boot_time::BootTime;
use serde::{Deserialize, Serialize};

/// Takeovers within this time are recent.
pub(crate) const RECENT: Duration = Duration::from_secs(600);
/// Recent takeovers after which the next one waits.
const FREE: usize = 3;
/// How long it waits. Each further one waits twice as long.
const FIRST_DELAY: Duration = Duration::from_secs(1);
/// Takeovers that are listed, the newest ones.
const LISTED: usize = 32;

label! {
    /// How an owner ended.
    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    OwnerEnd = "end" {
        /// The owner before was asked to end, for example for an upgrade.
        Stopped => "stopped",
        /// The owner before was killed, crashed, hung, or lost its lock.
        Died => "died",
    }
}

/// A standby became the owner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Takeover {
    /// Nanoseconds from the boot.
    pub(crate) at_ns: u64,
    /// The same instant, RFC 3339.
    pub at: String,
    /// How the owner before ended.
    pub end: OwnerEnd,
    /// Seconds for which the owner before had owned the node; `None` = not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_seconds: Option<u64>,
    /// Version of the owner before.
    pub from: String,
}

/// The takeovers of one boot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Takeovers {
    /// The boot that they are of.
    boot_id: String,
    #[serde(default)]
    stopped: u64,
    #[serde(default)]
    died: u64,
    /// The newest ones, oldest first.
    #[serde(default)]
    newest: VecDeque<Takeover>,
}

impl Takeovers {
    /// These, if they are of this boot.
    pub(crate) fn of_boot(self, boot_id: &str) -> Self {
        if self.boot_id == boot_id {
            return self;
        }
        Self {
            boot_id: boot_id.to_owned(),
            ..Self::default()
        }
    }

    pub(crate) fn add(&mut self, takeover: Takeover) {
        let count = match takeover.end {
            OwnerEnd::Stopped => &mut self.stopped,
            OwnerEnd::Died => &mut self.died,
        };
        *count = count.saturating_add(1);
        self.newest.push_back(takeover);
        while self.newest.len() > LISTED {
            self.newest.pop_front();
        }
    }

    /// Takeovers since the boot after such an end.
    pub(crate) fn since_boot(&self, end: OwnerEnd) -> u64 {
        match end {
            OwnerEnd::Stopped => self.stopped,
            OwnerEnd::Died => self.died,
        }
    }

    pub(crate) fn last(&self) -> Option<&Takeover> {
        self.newest.back()
    }

    /// The number of recent takeovers from owners that died.
    pub(crate) fn recent(&self, now: BootTime) -> usize {
        let age = |takeover: &Takeover| now.nanos().checked_sub(takeover.at_ns);
        let is_recent = |takeover: &&Takeover| {
            takeover.end == OwnerEnd::Died
                && age(takeover).is_some_and(|age| Duration::from_nanos(age) < RECENT)
        };
        self.newest.iter().filter(is_recent).count()
    }

    /// How long a standby waits before it takes over from an owner that has died, at most `longest`.
    pub(crate) fn delay(&self, now: BootTime, longest: Duration) -> Duration {
        let Some(further) = self.recent(now).checked_sub(FREE) else {
            return Duration::ZERO;
        };
        let doubled = u32::try_from(further)
            .ok()
            .and_then(|by| 1_u32.checked_shl(by));
        FIRST_DELAY
            .saturating_mul(doubled.unwrap_or(u32::MAX))
            .min(longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONGEST: Duration = Duration::from_secs(30);

    fn at(second: u64) -> BootTime {
        BootTime::from_nanos(second * 1_000_000_000)
    }

    fn takeover(second: u64, end: OwnerEnd) -> Takeover {
        Takeover {
            at_ns: at(second).nanos(),
            at: "2026-11-28T12:00:00Z".to_owned(),
            end,
            after_seconds: Some(2),
            from: "0.1.0".to_owned(),
        }
    }

    fn died(seconds: &[u64]) -> Takeovers {
        let mut all = Takeovers::default().of_boot("a");
        for second in seconds {
            all.add(takeover(*second, OwnerEnd::Died));
        }
        all
    }

    #[test]
    fn three_takeovers_are_at_once_and_each_further_one_waits_twice_as_long_up_to_the_limit() {
        let delay = |count: usize, longest| died(&vec![100; count]).delay(at(200), longest);
        let delays: Vec<u64> = (0..11)
            .map(|count| delay(count, LONGEST).as_secs())
            .collect();
        assert_eq!(delays, [0, 0, 0, 1, 2, 4, 8, 16, 30, 30, 30]);
        assert_eq!(delay(200, LONGEST), LONGEST);
        assert_eq!(delay(200, Duration::ZERO), Duration::ZERO);
        // Older ones are not listed.
        assert_eq!(delay(200, Duration::MAX).as_secs(), 1 << (LISTED - FREE));
    }

    #[test]
    fn a_takeover_that_is_long_ago_does_not_count() {
        let all = died(&[100, 101, 102, 650]);
        assert_eq!(all.recent(at(699)), 4);
        assert_eq!(all.delay(at(699), LONGEST), 2 * FIRST_DELAY);
        assert_eq!(all.recent(at(701)), 2);
        assert_eq!(all.delay(at(701), LONGEST), Duration::ZERO);
    }

    #[test]
    fn a_time_that_is_still_to_come_does_not_count() {
        // Only a damaged file has it: this clock is not set back.
        let all = died(&[1000, 1001, 1002, 1003]);
        assert_eq!(all.recent(at(10)), 0);
    }

    #[test]
    fn owners_that_were_stopped_are_no_loop() {
        let mut all = died(&[100, 101, 102]);
        for second in 103..120 {
            all.add(takeover(second, OwnerEnd::Stopped));
        }
        assert_eq!(all.recent(at(120)), 3);
        assert_eq!(all.since_boot(OwnerEnd::Stopped), 17);
        assert_eq!(all.since_boot(OwnerEnd::Died), 3);
        assert_eq!(all.last().map(|last| last.end), Some(OwnerEnd::Stopped));
    }

    #[test]
    fn a_boot_begins_without_takeovers_and_the_list_is_bounded() {
        let many: Vec<u64> = (0..1000).collect();
        let all = died(&many);
        assert_eq!(all.newest.len(), LISTED);
        assert_eq!(all.since_boot(OwnerEnd::Died), 1000);
        assert_eq!(all.clone().of_boot("a"), all);
        let after = all.of_boot("b");
        assert_eq!(after.since_boot(OwnerEnd::Died), 0);
        assert_eq!(after.last(), None);
    }
}
