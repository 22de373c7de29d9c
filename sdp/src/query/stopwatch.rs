//! Measures how long judging a query takes.

use std::time::{Duration, Instant};

/// Measures one query in [`Self::ONE_IN`], chosen by message id, because reading clocks costs more
/// than counting. It also measures every query that is reported to the agent.
#[derive(Debug)]
pub(crate) struct Stopwatch {
    is_sample: bool,
    is_reported: bool,
    began: Option<Instant>,
    check_began: Option<Instant>,
}

/// Durations of the steps in judging one query.
#[derive(Clone, Copy, Debug)]
pub(super) struct Judging {
    /// From the query's bytes to the verdict.
    pub(super) processing: Duration,
    /// The part of `processing` for the policy check.
    pub(super) policy_check: Duration,
    /// Whether the stage histograms record this query.
    pub(super) is_sample: bool,
    /// Whether this query is reported to the agent.
    pub(super) is_reported: bool,
}

impl Stopwatch {
    const ONE_IN: u8 = 16;

    /// Starts a stopwatch for the query `message`.
    pub(super) fn start(message: &[u8], is_reported: bool) -> Self {
        let id = message.get(1).copied().unwrap_or(1);
        let is_sample = id % Self::ONE_IN == 0;
        Self {
            is_sample,
            is_reported,
            began: (is_sample || is_reported).then(Instant::now),
            check_began: None,
        }
    }

    /// Whether this query is reported to the agent.
    pub(super) fn is_reported(&self) -> bool {
        self.is_reported
    }

    pub(crate) fn check_begins(&mut self) {
        self.check_began = self.began.map(|_| Instant::now());
    }

    /// Ends the measurement when the verdict is ready.
    pub(super) fn stop(&self) -> Option<Judging> {
        let (began, check_began) = (self.began?, self.check_began?);
        let now = Instant::now();
        Some(Judging {
            processing: now.duration_since(began),
            policy_check: now.duration_since(check_began),
            is_sample: self.is_sample,
            is_reported: self.is_reported,
        })
    }
}
