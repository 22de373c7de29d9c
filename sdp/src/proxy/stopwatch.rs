//! How long judging takes.

use std::time::Instant;

use super::stats::{Stage, Stages};

/// Times one query in [`Self::ONE_IN`], by its message id: clocks cost more than counters.
pub(super) struct Stopwatch(Instant);

impl Stopwatch {
    const ONE_IN: u8 = 16;

    pub(super) fn of(message: &[u8]) -> Option<Self> {
        let id = message.get(1).copied().unwrap_or(1);
        (id % Self::ONE_IN == 0).then(|| Self(Instant::now()))
    }

    pub(super) fn lap(&self) -> Self {
        Self(Instant::now())
    }

    /// `judging` began when policy was asked; now it has said whether it allows.
    pub(super) fn observe(&self, judging: &Self, allows: bool, stages: &Stages) {
        let Self(now) = self.lap();
        let (processing, check) = match allows {
            true => (Stage::Processing, Stage::PolicyCheck),
            false => (Stage::ProcessingDenied, Stage::PolicyCheckDenied),
        };
        stages.observe(processing, now.duration_since(self.0));
        stages.observe(check, now.duration_since(judging.0));
    }
}
