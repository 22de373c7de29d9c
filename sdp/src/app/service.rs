//! What the proxy reports to the service manager.

use std::time::{Duration, Instant};

use crate::{listener::Listeners, shared_state::Shared};

/// A worker that does nothing for this long hangs: an idle worker wakes up every five seconds.
const HUNG: Duration = Duration::from_secs(15);

/// Reports whether the proxy can serve, or which requirements are missing.
pub(super) fn report(shared: &Shared) {
    if !shared.manager.is_present() || shared.drain.is_leaving() {
        return;
    }
    let missing = shared.ready.missing();
    if missing.is_empty() {
        return shared.manager.state(true, "serves queries");
    }
    let missing = missing.iter().map(|(need, why)| format!("{need}: {why}"));
    let missing = missing.collect::<Vec<_>>().join("; ");
    shared.manager.state(false, &format!("missing: {missing}"));
}

/// When each worker was last seen at work.
#[derive(Debug)]
pub(super) struct Progress(Vec<(u64, Instant)>);

impl Progress {
    pub(super) fn new(listeners: &Listeners, now: Instant) -> Self {
        Self(
            listeners
                .turns()
                .into_iter()
                .map(|turns| (turns, now))
                .collect(),
        )
    }

    /// Tells the service manager that the process works, if each worker does.
    pub(super) fn report(&mut self, shared: &Shared, listeners: &Listeners, now: Instant) {
        if self.is_made(&listeners.turns(), now) {
            shared.manager.alive();
        }
    }

    fn is_made(&mut self, turns: &[u64], now: Instant) -> bool {
        for ((seen, at), turns) in self.0.iter_mut().zip(turns) {
            if seen != turns {
                (*seen, *at) = (*turns, now);
            }
        }
        let mut seen = self.0.iter();
        seen.all(|(_, at)| now.saturating_duration_since(*at) < HUNG)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_worker_that_hangs_is_enough() {
        let start = Instant::now();
        let mut progress = Progress(vec![(1, start), (1, start)]);
        let after = |seconds| start + Duration::from_secs(seconds);
        assert!(progress.is_made(&[1, 2], after(14)));
        assert!(!progress.is_made(&[1, 3], after(15)));
        assert!(progress.is_made(&[2, 3], after(16)));
    }
}
