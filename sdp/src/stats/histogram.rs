//! Histograms of how long the stages of a query take.

use std::{fmt, time::Duration};

use prometheus_client::{
    encoding::{EncodeMetric, MetricEncoder, NoLabelSet},
    metrics::MetricType,
};

use super::cells::Cells;

/// Upper bounds of the buckets, microseconds. One more bucket has no bound.
const BOUNDS_US: [u64; 15] = [
    5, 20, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 1_000_000,
    10_000_000,
];
const BUCKETS: usize = BOUNDS_US.len() + 1;
/// Index of the cell with the sum of all durations, each rounded up to microseconds.
const SUM_US: usize = BUCKETS;

/// Durations in fixed buckets, without a lock.
#[derive(Clone, Debug)]
struct Histogram(Cells);

impl Histogram {
    fn new() -> Self {
        Self(Cells::new(BUCKETS + 1))
    }

    fn observe(&self, took: Duration) {
        let us = u64::try_from(took.as_nanos().div_ceil(1000)).unwrap_or(u64::MAX);
        self.0
            .add(BOUNDS_US.partition_point(|bound| *bound < us), 1);
        self.0.add(SUM_US, us);
    }

    #[expect(
        clippy::cast_precision_loss,
        reason = "a sum for people; exact to 2^53 us"
    )]
    fn encode(&self, encoder: &mut MetricEncoder<'_>) -> fmt::Result {
        let bounds = BOUNDS_US
            .iter()
            .map(|us| *us as f64 / 1e6)
            .chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip((0..BUCKETS).map(|at| self.0.get(at))).collect();
        let count = buckets.iter().map(|b| b.1).sum();
        let sum = self.0.get(SUM_US) as f64 / 1e6;
        encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
    }
}

/// A stage of a query, and how the query ended. The label values are Cilium's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// From a query to the release of its answer.
    Total,
    /// From a query to its end without an answer.
    TotalTimeout,
    /// From sending a query on to its answer.
    Upstream,
    /// From an answer's arrival to its release, for answers that waited for the agent.
    Dataplane,
    /// Reading and judging a query that is allowed.
    Processing,
    /// Reading and judging a query that is refused.
    ProcessingDenied,
    /// The policy check of an allowed query, which is a part of its processing.
    PolicyCheck,
    /// The policy check of a refused query, which is a part of its processing.
    PolicyCheckDenied,
}

impl Stage {
    /// All stages, with the values of the labels `error` and `scope`.
    const ALL: [(Self, &'static str, &'static str); 8] = [
        (Self::Total, "allow", "totalTime"),
        (Self::TotalTimeout, "timeout", "totalTime"),
        (Self::Upstream, "allow", "upstreamTime"),
        (Self::Dataplane, "allow", "dataplaneTime"),
        (Self::Processing, "allow", "processingTime"),
        (Self::ProcessingDenied, "denied", "processingTime"),
        (Self::PolicyCheck, "allow", "policyCheckTime"),
        (Self::PolicyCheckDenied, "denied", "policyCheckTime"),
    ];
}

/// Meanings of the labels of [`Stages`].
pub(crate) const STAGE_MEANINGS: [(&str, &str, &str); 8] = [
    ("error", "allow", "Queries that policy allows."),
    ("error", "denied", "Queries that policy refuses."),
    (
        "error",
        "timeout",
        "Queries that their DNS server did not answer in time.",
    ),
    (
        "scope",
        "totalTime",
        "From a query's arrival to the release of its answer.",
    ),
    (
        "scope",
        "upstreamTime",
        "From forwarding a query to the arrival of the server's answer.",
    ),
    (
        "scope",
        "dataplaneTime",
        "From an answer's arrival to its release, for answers that waited until the agent had opened their addresses.",
    ),
    (
        "scope",
        "processingTime",
        "Parsing a query and applying policy to it. Measured for one query in 16, selected by message id.",
    ),
    (
        "scope",
        "policyCheckTime",
        "The part of processingTime that policy takes, for the same queries.",
    ),
];

/// One histogram of durations for each [`Stage`].
#[derive(Clone, Debug)]
pub struct Stages(Vec<Histogram>);

impl Default for Stages {
    fn default() -> Self {
        Self(Stage::ALL.iter().map(|_| Histogram::new()).collect())
    }
}

impl Stages {
    /// Records the duration of one stage.
    pub fn observe(&self, stage: Stage, took: Duration) {
        if let Some(histogram) = self.0.get(stage as usize) {
            histogram.observe(took);
        }
    }
}

impl EncodeMetric for Stages {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        for (histogram, (_, error, scope)) in self.0.iter().zip(Stage::ALL) {
            let labels = [("error", error), ("scope", scope)];
            histogram.encode(&mut encoder.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::{encoding::text, registry::Registry};

    use super::*;

    #[test]
    fn every_stage_has_its_index_and_bounds_belong_to_their_bucket() {
        for (at, (stage, ..)) in Stage::ALL.iter().enumerate() {
            assert_eq!(*stage as usize, at);
        }
        let stages = Stages::default();
        stages.observe(Stage::Upstream, Duration::from_micros(5));
        stages.observe(Stage::Upstream, Duration::from_nanos(5_001));
        stages.observe(Stage::Upstream, Duration::from_secs(60));
        let mut registry = Registry::default();
        registry.register("t", "Test", stages);
        let mut shown = String::new();
        text::encode(&mut shown, &registry).expect("text");
        let labels = "error=\"allow\",scope=\"upstreamTime\"";
        for line in [
            format!("t_sum{{{labels}}} 60.000011"),
            format!("t_count{{{labels}}} 3"),
            format!("t_bucket{{le=\"0.000005\",{labels}}} 1"),
            format!("t_bucket{{le=\"0.00002\",{labels}}} 2"),
            format!("t_bucket{{le=\"10.0\",{labels}}} 2"),
            format!("t_bucket{{le=\"+Inf\",{labels}}} 3"),
        ] {
            assert!(
                shown.lines().any(|l| l == line),
                "{line} is not in\n{shown}"
            );
        }
    }
}
