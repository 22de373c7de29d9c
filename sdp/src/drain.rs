//! Leaving in two phases: stop taking work and finish what is in flight; then,
//! at the deadline or at the second signal, end at once.

use std::{
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// The two phases as tokens. All clones share one state.
#[derive(Clone, Debug, Default)]
pub struct Drain {
    leave: CancellationToken,
    force: CancellationToken,
    begun: Arc<OnceLock<Instant>>,
}

/// Whether a drain request is the first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainRequest {
    /// This request is the first, and has begun the first phase.
    First,
    /// The drain had begun already. A repeated signal begins the second phase.
    Repeated,
}

impl Drain {
    /// Begins the first phase, if it has not begun yet.
    pub fn begin(&self) -> DrainRequest {
        if self.leave.is_cancelled() {
            return DrainRequest::Repeated;
        }
        self.begun.get_or_init(Instant::now);
        self.leave.cancel();
        DrainRequest::First
    }

    /// Begins the second phase, and the first one if it has not begun.
    pub fn force(&self) {
        self.begun.get_or_init(Instant::now);
        self.leave.cancel();
        self.force.cancel();
    }

    /// Whether the first phase began.
    pub fn is_leaving(&self) -> bool {
        self.leave.is_cancelled()
    }

    /// When the first phase began.
    pub fn begun(&self) -> Option<Instant> {
        self.begun.get().copied()
    }

    /// Waits for the first phase.
    pub async fn leaving(&self) {
        self.leave.cancelled().await;
    }

    /// Runs `work` until it is done, `limit` passed or the second phase began.
    /// Returns whether it was done.
    pub async fn within<F: Future<Output = ()>>(&self, limit: Duration, work: F) -> bool {
        tokio::select! {
            done = tokio::time::timeout(limit, work) => done.is_ok(),
            () = self.force.cancelled() => false,
        }
    }

    /// Turns SIGTERM and SIGINT into the phases: the first signal begins the first phase, the
    /// second signal the second. Never returns.
    pub async fn follow_signals(&self) -> std::io::Result<()> {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        loop {
            let name = tokio::select! {
                _ = terminate.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
            };
            match self.begin() {
                DrainRequest::First => {
                    tracing::info!(
                        signal = name,
                        "draining; a second signal stops the proxy at once"
                    )
                }
                DrainRequest::Repeated => {
                    tracing::warn!(signal = name, "second signal; stopping at once");
                    self.force();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_second_request_ends_the_work() {
        let drain = Drain::default();
        assert_eq!(drain.begin(), DrainRequest::First);
        drain.leaving().await;
        let other = drain.clone();
        let work = drain.within(Duration::from_secs(3600), std::future::pending());
        let (done, ()) = tokio::join!(work, async {
            assert_eq!(other.begin(), DrainRequest::Repeated);
            other.force();
        });
        assert!(!done);
        assert!(drain.is_leaving());
    }

    #[tokio::test]
    async fn finished_work_is_distinguished_from_the_deadline() {
        let drain = Drain::default();
        assert!(drain.within(Duration::from_secs(5), async {}).await);
        assert!(!drain.within(Duration::ZERO, std::future::pending()).await);
    }
}
