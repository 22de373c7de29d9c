//! Counts of the resolver.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::observe::{Failure, Outcome};

/// How a look-up ended, for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LookupResult {
    /// The answer has at least one address.
    Found,
    /// The name exists and has no address.
    NoData,
    /// The name does not exist.
    NxDomain,
    /// A response code other than NOERROR and NXDOMAIN.
    Refused,
    /// No server answered in time, or no server can be reached.
    Silent,
    /// There is no DNS server to ask.
    NoServer,
}

impl LookupResult {
    pub const ALL: [Self; 6] = [
        Self::Found,
        Self::NoData,
        Self::NxDomain,
        Self::Refused,
        Self::Silent,
        Self::NoServer,
    ];

    /// Value of the label `outcome`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Found => "found",
            Self::NoData => "no_data",
            Self::NxDomain => "nxdomain",
            Self::Refused => "error",
            Self::Silent => "timeout",
            Self::NoServer => "no_server",
        }
    }
}

impl From<&Outcome> for LookupResult {
    fn from(outcome: &Outcome) -> Self {
        match outcome {
            Outcome::Found(_) => Self::Found,
            Outcome::NoData => Self::NoData,
            Outcome::Failed(Failure::Silent) => Self::Silent,
            Outcome::Failed(failure) if failure.is_final() => Self::NxDomain,
            Outcome::Failed(Failure::Code(_)) => Self::Refused,
        }
    }
}

/// How the write of a status ended, for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteResult {
    /// It is in the store.
    Written,
    /// Another agent wrote at the same time; it was tried again.
    Conflict,
    /// The store refused it, or cannot be reached.
    Failed,
}

impl WriteResult {
    pub const ALL: [Self; 3] = [Self::Written, Self::Conflict, Self::Failed];

    /// Value of the label `outcome`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Written => "written",
            Self::Conflict => "conflict",
            Self::Failed => "failed",
        }
    }
}

/// Counts of look-ups, of writes and of addresses without room, since the agent started.
#[derive(Debug, Default)]
pub struct Counters {
    lookups: [AtomicU64; LookupResult::ALL.len()],
    writes: [AtomicU64; WriteResult::ALL.len()],
    left_out: AtomicU64,
}

impl Counters {
    pub fn lookup(&self, result: LookupResult) {
        self.lookups[result as usize].fetch_add(1, Relaxed);
    }

    pub fn write(&self, result: WriteResult) {
        self.writes[result as usize].fetch_add(1, Relaxed);
    }

    /// Counts addresses that an object has no room for.
    pub fn left_out(&self, addresses: usize) {
        self.left_out
            .fetch_add(u64::try_from(addresses).unwrap_or(u64::MAX), Relaxed);
    }

    pub fn lookups(&self) -> [(LookupResult, u64); LookupResult::ALL.len()] {
        LookupResult::ALL.map(|result| (result, self.lookups[result as usize].load(Relaxed)))
    }

    pub fn writes(&self) -> [(WriteResult, u64); WriteResult::ALL.len()] {
        WriteResult::ALL.map(|result| (result, self.writes[result as usize].load(Relaxed)))
    }

    /// Addresses that objects had no room for.
    pub fn addresses_left_out(&self) -> u64 {
        self.left_out.load(Relaxed)
    }
}
