//! Measures how long judging a query takes.

use std::time::{Duration, Instant};

/// Measures one query in [`Self::ONE_IN`], chosen by message id, because clocks cost more than
/// counters. It also measures every query of which the agent gets a report.
#[derive(Debug)]
pub(crate) struct Stopwatch {
    is_sample: bool,
    is_reported: bool,
    began: Option<Instant>,
    check_began: Option<Instant>,
}

/// Durations of judging.
#[derive(Clone, Copy, Debug)]
pub(super) struct Judging {
    /// From the query's bytes to the verdict.
    pub(super) processing: Duration,
    /// Of that: the policy check.
    pub(super) policy_check: Duration,
    /// Whether the stage histograms record this query.
    pub(super) is_sample: bool,
    /// Whether the agent gets a report of this query.
    pub(super) is_reported: bool,
}

impl Stopwatch {
    const ONE_IN: u8 = 16;

    /// Starts for the query `message`.
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

    /// Whether the agent gets a report of this query.
    pub(super) fn is_reported(&self) -> bool {
        self.is_reported
    }

    /// The policy check begins.
    pub(crate) fn check_begins(&mut self) {
        self.check_began = self.began.map(|_| Instant::now());
    }

    /// The verdict is known.
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
