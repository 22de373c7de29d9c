//! The main path: from a query to its answer, free of sockets.

pub mod stats;

use std::{sync::Arc, time::Duration};

pub use stats::Stats;

use crate::{mapping::MappingSink, policy::table::PolicyHandle, resolve::Resolver};

/// What a refused name is answered with (`--tofqdns-dns-reject-response-code`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RejectCode {
    /// REFUSED.
    #[default]
    Refused,
    /// NXDOMAIN, with a synthesised SOA.
    NameError,
}

/// Settings of the main path.
#[derive(Clone, Debug)]
pub struct ProxyConfig {
    /// Port the listeners are bound to: never a server's.
    pub port: u16,
    /// Answer to a name that policy does not allow.
    pub reject: RejectCode,
    /// How long an answer waits for the agent at most.
    pub max_delay: Duration,
    /// How long a query waits for its server at most.
    pub timeout: Duration,
    /// Queries in flight at most, all workers and endpoints together.
    pub in_flight: usize,
    /// Whether servers may be at a loopback address (tests; a loop is possible then).
    pub loopback_servers: bool,
}

impl Default for ProxyConfig {
    fn default() -> Self {
        Self {
            port: 10094,
            reject: RejectCode::Refused,
            max_delay: Duration::from_millis(100),
            timeout: Duration::from_secs(10),
            in_flight: 65_536,
            loopback_servers: false,
        }
    }
}

/// Judges queries and learns from answers. Shared by all workers.
pub struct Proxy {
    config: ProxyConfig,
    resolver: Arc<dyn Resolver>,
    policy: Arc<PolicyHandle>,
    sink: Arc<dyn MappingSink>,
    stats: Stats,
}

impl Proxy {
    /// With its four neighbours.
    pub fn new(
        config: ProxyConfig,
        resolver: Arc<dyn Resolver>,
        policy: Arc<PolicyHandle>,
        sink: Arc<dyn MappingSink>,
        stats: Stats,
    ) -> Self {
        Self {
            config,
            resolver,
            policy,
            sink,
            stats,
        }
    }

    /// Settings.
    pub fn config(&self) -> &ProxyConfig {
        &self.config
    }

    /// Counters.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Who and whom.
    pub fn resolver(&self) -> &dyn Resolver {
        &*self.resolver
    }

    /// Rules in force.
    pub fn policy(&self) -> &PolicyHandle {
        &self.policy
    }

    /// Where mappings go.
    pub fn sink(&self) -> &dyn MappingSink {
        &*self.sink
    }
}
