//! How often changes of labels are written: each write is an event for every agent of the cluster.

use std::time::Duration;

use tokio::time::Instant;

/// Pause after a first write.
const FIRST: Duration = Duration::from_secs(5);
/// Longest pause, if the labels change all the time.
const LONGEST: Duration = Duration::from_secs(80);

/// The pause between writes: it doubles with each write, and begins again after a quiet time.
#[derive(Debug, Default)]
pub(super) struct Pace {
    last: Option<(Instant, Duration)>,
}

impl Pace {
    /// Whether a change may be written at this time.
    pub(super) fn allows(&self, now: Instant) -> bool {
        self.last.is_none_or(|(at, pause)| now >= at + pause)
    }

    /// Notes a write at this time.
    pub(super) fn note(&mut self, now: Instant) {
        let pause = match self.last {
            Some((at, pause)) if now < at + 2 * pause + LONGEST => (2 * pause).min(LONGEST),
            _ => FIRST,
        };
        self.last = Some((now, pause));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many writes there are in this time, if the labels change all the time.
    fn writes(pace: &mut Pace, from: Instant, seconds: u64) -> usize {
        let all = (0..seconds).map(|second| from + Duration::from_secs(second));
        all.filter(|now| {
            let allows = pace.allows(*now);
            if allows {
                pace.note(*now);
            }
            allows
        })
        .count()
    }

    #[test]
    fn a_storm_of_changes_is_slowed_down_and_a_single_change_is_not() {
        let (mut pace, begin) = (Pace::default(), Instant::now());
        assert!(pace.allows(begin));
        // At 0, 5, 15, 35, 75, and then every 80 seconds.
        assert_eq!(writes(&mut pace, begin, 75), 4);
        let later = begin + Duration::from_secs(75);
        assert_eq!(writes(&mut pace, later, 800), 10);
        let quiet = later + Duration::from_secs(2000);
        assert!(pace.allows(quiet));
        pace.note(quiet);
        assert!(pace.allows(quiet + FIRST));
    }
}
