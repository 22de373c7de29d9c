//! Where endpoints are, for proxies that cannot read the maps.

use std::{collections::BTreeSet, net::IpAddr};

use dns_policy::rule::Transport;
use ipnet::IpNet;
use shared_maps::{EndpointId, IdentityId};

/// Endpoints, identities and prefixes, without learned names. It costs far less than a [`crate::core::Snapshot`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Directory {
    /// Endpoints in the order of their numbers.
    pub locations: Vec<EndpointLocation>,
    /// Allocated identities by number, reserved ones left out.
    pub identities: Vec<IdentityId>,
    /// Endpoints, ports and transports for which files of the earlier run had rules: a proxy may
    /// still have them.
    pub former: BTreeSet<RuleKey>,
    /// Prefixes with the identity in the datapath, or the intended one if there is none.
    pub prefixes: Vec<(IpNet, IdentityId)>,
}

/// The key by which a proxy knows rules: endpoint, port of the servers, transport.
pub type RuleKey = (EndpointId, u16, Transport);

/// The addresses and the interface of one endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointLocation {
    pub id: EndpointId,
    pub identity: IdentityId,
    /// Index of the host-side interface.
    pub ifindex: u32,
    /// Its addresses, with IPv4 first.
    pub addresses: Vec<IpAddr>,
}
