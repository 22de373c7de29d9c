//! `ep_config.json`: what a restart, and a proxy without an agent, need to know.

mod json;
mod rules;
mod unrendered;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use dns_policy::{name::Fqdn, rule::EndpointRules, stored_rules::UnknownProtocol};
use shared_maps::{EndpointId, IdentityId};

use crate::{
    endpoint::spec::{EndpointSpec, PodInterface},
    labels::LabelSet,
};

/// An endpoint as its file has it.
#[derive(Clone, Debug, PartialEq)]
pub struct EndpointFile {
    pub id: EndpointId,
    /// Key at its source; empty in files of other writers.
    pub key: String,
    pub identity: IdentityId,
    pub labels: LabelSet,
    pub ipv4: Option<Ipv4Addr>,
    pub ipv6: Option<Ipv6Addr>,
    pub interface: PodInterface,
    /// Where the network namespace was found.
    pub netns: String,
    /// The pod that it is, `namespace/name`. It is only written, for proxies and people, and never read back:
    /// the source names the pod again.
    pub pod: Option<String>,
    /// Addresses learned and not expired.
    pub history: Vec<HistoryEntry>,
    /// Expired addresses that connections may still use.
    pub zombies: Vec<ZombieEntry>,
    /// DNS rules by server identity, if the file has the JSON key `HoldfastDNSRules`; files of Cilium do not.
    pub rules: Option<RulesInFile>,
}

impl EndpointFile {
    /// The endpoint as its source described it when the file was written.
    pub fn spec(&self) -> EndpointSpec {
        let addresses = [self.ipv4.map(IpAddr::V4), self.ipv6.map(IpAddr::V6)];
        EndpointSpec {
            key: self.key.clone(),
            labels: self.labels.texts(),
            interface: self.interface.clone(),
            addresses: addresses.into_iter().flatten().collect(),
            netns: self.netns.clone(),
            pod: None,
            pod_uid: None,
        }
    }

    /// Whether this agent wrote it since the machine booted. Only then do interfaces have the numbers
    /// that it says.
    pub fn is_of_boot(&self, boot_id: &str) -> bool {
        let rules = self.rules.as_ref();
        !self.key.is_empty() && rules.is_some_and(|rules| rules.boot_id == boot_id)
    }
}

/// Addresses that one lookup gave. Instants are nanoseconds of Unix time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistoryEntry {
    pub name: Fqdn,
    /// When it was looked up.
    pub lookup: u64,
    pub expires: u64,
    /// TTL, seconds.
    pub ttl: u32,
    pub addresses: Vec<IpAddr>,
    /// End of the TTL of the answers in which trusted DNS servers gave these addresses; 0 = no trusted server gave
    /// them.
    pub trusted_until: u64,
}

/// An expired address. Instants are nanoseconds of Unix time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZombieEntry {
    pub address: IpAddr,
    /// Names under which it was learned.
    pub names: Vec<Fqdn>,
    /// Names under which a trusted DNS server gave it.
    pub trusted: Vec<Fqdn>,
    /// Start of the last conntrack scan that found a connection to the address, plus the idle grace period; 0 = no
    /// scan found one.
    pub alive_at: u64,
    /// When the address expired.
    pub delete_pending_at: u64,
}

/// DNS rules with the run and revision of the agent that wrote them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RulesInFile {
    /// Boot id of the machine when they were written.
    pub boot_id: String,
    /// The agent's start count when they were written.
    pub start: u64,
    /// Revision of the policy when they were written.
    pub revision: u64,
    pub rules: EndpointRules,
}

/// What is wrong with a file.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// Not JSON, or a field of the wrong type.
    #[error(
        "ep_config.json: {0} (remove the endpoint's directory; the agent then writes a new one)"
    )]
    Json(#[from] serde_json::Error),
    /// A field's text cannot be read.
    #[error("ep_config.json: field {field}: `{value}` cannot be read")]
    Field { field: &'static str, value: String },
    #[error("ep_config.json: {0}")]
    Protocol(#[from] UnknownProtocol),
    /// Written by a newer version.
    #[error(
        "ep_config.json: HoldfastDNSRules has version {0}; this program reads up to 1: upgrade holdfast-agent"
    )]
    Newer(u64),
}

pub use self::json::{parse, render};
pub(crate) use self::unrendered::{LearnedPair, UnrenderedFile};

/// The addresses of each server identity, for the form of the rules that names servers by address (Cilium's
/// `DNSRulesV2`).
pub type ServerAddresses = std::collections::BTreeMap<IdentityId, Vec<ipnet::IpNet>>;

#[cfg(test)]
mod tests;
