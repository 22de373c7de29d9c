//! DNSNameResolver objects and the names in them, as values: policies, the core and the resolver use
//! them.

pub mod dns_name;
pub mod object;

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    time::{Duration, SystemTime},
};

use dns_policy::name::Fqdn;

/// Maximum number of DNSNameResolver objects of a cluster that are read or made.
pub const MAX_OBJECTS: usize = 10_000;

/// The names that EgressFirewalls use, which the resolver has to look up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WantedNames {
    /// Lower case, with the final dot; `*.` at the beginning means one label.
    pub names: BTreeSet<Fqdn>,
    /// Whether every policy document was read, so that `names` has every name that a firewall uses.
    /// Until then no object is removed.
    pub is_complete: bool,
}

/// An answer of a trusted DNS server. The core accepted the answer, and it has at least one address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observation {
    /// The name in the question, whatever CNAMEs the answer has.
    pub name: Fqdn,
    /// The addresses of one family in the answer.
    pub addresses: Vec<IpAddr>,
    /// The least TTL of its records, CNAMEs included, raised or lowered to the limits of the agent.
    pub ttl: Duration,
    /// Wall time at which the answer came.
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
