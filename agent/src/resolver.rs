//! DNSNameResolver objects: names of EgressFirewalls are looked up before their TTLs end, and what
//! one node learned all know.
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
pub(crate) mod schedule;
pub mod store;
pub mod task;
#[cfg(test)]
pub(crate) mod vectors;
pub mod view;

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::{Duration, SystemTime},
};

use dns_policy::name::Fqdn;

pub(crate) use crate::name_objects::dns_name;
pub use crate::name_objects::{WantedNames, object};

use self::object::Settings;

/// An answer of a trusted DNS server that the core took: it has at least one address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observation {
    /// The question's name.
    pub name: Fqdn,
    /// A and AAAA records that it has, of one family.
    pub addresses: Vec<IpAddr>,
    /// The least TTL of the chain.
    pub ttl: Duration,
    /// When the answer came.
    pub at: SystemTime,
}

/// What an object of the store says of its name, at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedName {
    /// The object's `namespace/name`.
    pub key: String,
    /// `spec.name`: lower case, with the final dot; `*.` at its beginning means one label.
    pub name: Fqdn,
    /// Every address in its status.
    pub addresses: BTreeSet<IpAddr>,
}

/// DNS servers whose answers count for EgressFirewalls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustedServers {
    /// Addresses that pods ask: answers from them count.
    pub asked: BTreeSet<SocketAddr>,
    /// Servers that the resolver asks.
    pub backends: BTreeSet<SocketAddr>,
}

/// Where objects are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a directory: `--resolver-dir`.
    Directory(PathBuf),
    /// In the Kubernetes API.
    Kubernetes,
}

/// Settings of the resolver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolverSettings {
    /// Where its objects are.
    pub place: Place,
    /// It may write them.
    pub writes: bool,
    /// Their namespace.
    pub namespace: String,
    /// How long a leader that does not renew its Lease stays the leader, in Kubernetes.
    pub lease: Duration,
    /// How answers become a status.
    pub settings: Settings,
}
