//! What a DNS answer says about a name, and what the agent reports back about it.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use shared_maps::EndpointId;

use crate::{boot_time::BootTime, name::Fqdn, rule::Transport};

/// Maximum duration of a lease, so that an agent that must break a lease waits no longer than this.
/// Each mapping renews the lease.
pub const LONGEST_LEASE: Duration = Duration::from_secs(3600);

/// One endpoint as it is now: its number may be reused, an instance is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EndpointInstance {
    /// Number of the endpoint, which the agent may reuse.
    pub id: EndpointId,
    /// Address the query came from.
    pub client: IpAddr,
    /// Index of the host-side interface.
    pub ifindex: u32,
}

/// Name → addresses, as one answer to one endpoint said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Endpoint that sent the query.
    pub endpoint: EndpointInstance,
    /// Name of the DNS question.
    pub name: Fqdn,
    /// A and AAAA records reached from the question's name; never empty.
    pub addresses: Vec<IpAddr>,
    /// Minimum of the TTLs in the chain, seconds.
    pub ttl: u32,
    /// When the answer reached the proxy.
    pub seen_at: BootTime,
    /// Response code of the answer: 0, because other answers give no mapping.
    pub rcode: u8,
    /// Server that sent the answer.
    pub server: SocketAddr,
    /// Transport of the client's query.
    pub transport: Transport,
    /// Whether the mapping was sent again from a table, and not from a live answer.
    pub replayed: bool,
}

/// Reads an address of 4 or 16 bytes, as messages have it.
pub fn address(bytes: &[u8]) -> Option<IpAddr> {
    if let Ok(v4) = <[u8; 4]>::try_from(bytes) {
        return Some(v4.into());
    }
    <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from)
}

/// The 4 or 16 bytes of an address.
pub fn address_bytes(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

/// What became of a mapping at the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Realised {
    /// The datapath has every address, or needs none of them.
    Yes,
    /// The agent refused it or could not plumb it; the answer is released and counted.
    No(Refusal),
    /// The agent went away or is not there.
    AgentAway,
}

/// Why the agent did not realise a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The endpoint instance does not exist, or it is younger than the answer.
    EndpointUnknown,
    /// The endpoint's DNS policy does not allow the name at this server.
    NotAllowed,
    /// A field is out of range.
    Invalid,
    /// Too many mappings on this stream.
    RateLimited,
    /// The datapath could not take it: map full, identities exhausted.
    NotRealised,
    /// The agent wants the client to get SERVFAIL. Only agents whose protocol has no other reason (FQDNData) say so.
    Rejected,
}
