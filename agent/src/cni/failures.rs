//! ADDs of the CNI plugin that failed, counted by reason.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// Why a pod did not start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddFailure {
    /// The agent is starting, stopping, or too busy to answer in time.
    Agent,
    /// The pod's interface cannot be under policy.
    Interface,
    /// The list of pods cannot be written.
    Disk,
    /// Policy was not in force in time: the pod's labels are not known, for example.
    Policy,
}

impl AddFailure {
    pub const ALL: [Self; 4] = [Self::Agent, Self::Interface, Self::Disk, Self::Policy];

    /// Value of the metric label `reason`.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Interface => "interface",
            Self::Disk => "disk",
            Self::Policy => "policy",
        }
    }
}

/// Failed ADDs by reason, since the agent started.
#[derive(Clone, Debug, Default)]
pub(crate) struct AddFailures(Arc<[AtomicU64; AddFailure::ALL.len()]>);

impl AddFailures {
    fn of(&self, failure: AddFailure) -> Option<&AtomicU64> {
        self.0.get(failure as usize)
    }

    pub(super) fn count(&self, failure: AddFailure) {
        if let Some(count) = self.of(failure) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Each reason with its count.
    pub(crate) fn counts(&self) -> [(AddFailure, u64); AddFailure::ALL.len()] {
        AddFailure::ALL.map(|failure| {
            let count = self.of(failure);
            let count = count.map_or(0, |count| count.load(Ordering::Relaxed));
            (failure, count)
        })
    }
}
