//! DNSNameResolver objects: one agent looks up names of EgressFirewalls before their TTLs end, and all nodes get the
//! addresses that one node learned.
//!
//! ```text
//!  core ── Observation ─► resolver task ─► store (file or Kubernetes) ─► watch, every agent
//!                          │      ▲ WantedNames                              │
//!                          └─ A, AAAA to TrustedServers                      └─ ResolvedName ─► core
//! ```

pub mod ask;
pub mod book;
pub mod counters;
pub mod feed;
pub mod names;
pub mod observe;
pub mod queue;
pub mod schedule;
pub mod store;
pub mod task;
#[cfg(test)]
pub(crate) mod vectors;
pub mod view;

use std::{path::PathBuf, time::Duration};

pub(crate) use agent_core::name_objects::dns_name;
pub use agent_core::name_objects::{
    Observation, ResolvedName, TrustedServers, WantedNames, object,
};

use self::object::Settings;

/// Where DNSNameResolver objects are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// YAML files in the subdirectory `dnsnameresolvers` of `--resolver-dir`.
    Directory(PathBuf),
    /// Custom resources in the Kubernetes API.
    Kubernetes,
}

/// Settings of the resolver, from the `--resolver-*` flags.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolverSettings {
    pub place: Place,
    /// Whether this agent writes objects; false with `--resolver consume`.
    pub writes: bool,
    /// Namespace of the objects (`--resolver-namespace`).
    pub namespace: String,
    /// How long a leader that does not renew its Lease stays the leader, in Kubernetes.
    pub lease: Duration,
    /// How answers become a status.
    pub settings: Settings,
}
