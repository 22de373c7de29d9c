//! Counts of the resolver.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use daemon::{label, metrics::Counts};

use super::observe::{Failure, Outcome};

label! {
    /// How a look-up ended.
    LookupResult = "outcome" {
        /// At least one server gave addresses.
        Found => "found",
        /// The name exists, but has no address.
        NoData => "no_data",
        /// The name does not exist.
        NxDomain => "nxdomain",
        /// The servers answered with another error code.
        Refused => "error",
        /// No server answered within 5 s.
        Silent => "timeout",
        /// No DNS server is trusted, or none is ready.
        NoServer => "no_server",
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

label! {
    /// How the write of a status ended.
    WriteResult = "outcome" {
        /// The status was written.
        Written => "written",
        /// Another agent wrote the object at the same time. This agent tries again.
        Conflict => "conflict",
        /// The API server or the file system refused the write, or the agent could not reach the
        /// API server.
        Failed => "failed",
    }
}

/// Counts since the agent started.
#[derive(Debug, Default)]
pub struct Counters {
    pub lookups: Counts<LookupResult>,
    pub writes: Counts<WriteResult>,
    left_out: AtomicU64,
}

impl Counters {
    /// Counts addresses that an object has no room for.
    pub fn left_out(&self, addresses: usize) {
        self.left_out
            .fetch_add(u64::try_from(addresses).unwrap_or(u64::MAX), Relaxed);
    }

    /// Addresses that objects had no room for.
    pub fn addresses_left_out(&self) -> u64 {
        self.left_out.load(Relaxed)
    }
}
