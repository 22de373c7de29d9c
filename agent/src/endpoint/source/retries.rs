//! When a document that could not be resolved is tried again.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// Pause after the first failure. Interfaces and addresses of a new pod come one after another.
const FIRST: Duration = Duration::from_millis(25);
/// Longest pause between two attempts at a document.
const LONGEST: Duration = Duration::from_secs(5);

/// Documents that failed. Each pause is twice as long as the previous one.
#[derive(Debug, Default)]
pub(super) struct Retries(BTreeMap<String, Retry>);

#[derive(Debug)]
struct Retry {
    at: Instant,
    pause: Duration,
}

impl Retries {
    /// Whether a document may be tried now.
    pub(super) fn is_due(&self, key: &str, now: Instant) -> bool {
        self.0.get(key).is_none_or(|retry| retry.at <= now)
    }

    pub(super) fn failed(&mut self, key: &str, now: Instant) {
        let before = self.0.get(key).map(|retry| retry.pause);
        let pause = before.map_or(FIRST, |pause| (pause * 2).min(LONGEST));
        let at = now + pause;
        self.0.insert(key.to_owned(), Retry { at, pause });
    }

    /// Forgets a document that is resolved or gone.
    pub(super) fn forget(&mut self, key: &str) {
        self.0.remove(key);
    }

    /// Forgets documents that are not wanted any more.
    pub(super) fn retain(&mut self, is_wanted: impl Fn(&str) -> bool) {
        self.0.retain(|key, _| is_wanted(key));
    }

    /// Makes every document due, after a change of the node's interfaces or routes.
    pub(super) fn reset(&mut self) {
        self.0.clear();
    }

    /// Time until the first document is due.
    pub(super) fn next(&self, now: Instant) -> Option<Duration> {
        let due = self.0.values().map(|retry| retry.at).min();
        due.map(|due| due.saturating_duration_since(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_five_seconds_and_start_over_when_an_interface_changes() {
        let mut retries = Retries::default();
        let mut now = Instant::now();
        let mut pauses = Vec::new();
        for _ in 0..12 {
            assert!(retries.is_due("a", now));
            retries.failed("a", now);
            let pause = retries.next(now).unwrap();
            assert!(!retries.is_due("a", now + pause - Duration::from_millis(1)));
            now += pause;
            pauses.push(pause.as_millis());
        }
        assert_eq!(pauses[..4], [25, 50, 100, 200]);
        assert_eq!(pauses[8..], [5000; 4]);
        retries.failed("a", now);
        retries.reset();
        assert!(retries.is_due("a", now));
        retries.failed("a", now);
        assert_eq!(retries.next(now), Some(FIRST));
        retries.forget("a");
        assert_eq!(retries.next(now), None);
    }
}
