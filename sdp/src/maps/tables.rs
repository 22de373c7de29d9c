//! Endpoints and prefixes in memory: the tables that a Cilium agent sent over FQDNData, or the
//! content of a map.

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
};

use ipnet::IpNet;
use shared_maps::{EndpointId, IdentityId};

use super::instances::{Instance, Instances};
use crate::resolve::QueryClient;

/// Endpoints and prefixes with their identities.
#[derive(Clone, Debug, Default)]
pub struct AgentTables {
    pub(super) endpoints: HashMap<IpAddr, (EndpointId, IdentityId)>,
    pub(super) prefixes: HashMap<IpNet, IdentityId>,
    lengths: BTreeSet<u8>,
}

impl AgentTables {
    /// Adds an address of a local endpoint.
    pub fn add_endpoint(&mut self, ip: IpAddr, id: EndpointId, identity: IdentityId) {
        self.endpoints.insert(ip, (id, identity));
    }

    /// Adds a prefix; host bits are cleared.
    pub fn add_prefix(&mut self, prefix: IpNet, identity: IdentityId) {
        self.lengths.insert(prefix.prefix_len());
        self.prefixes.insert(prefix.trunc(), identity);
    }

    /// The prefixes, in no order.
    pub fn prefixes(&self) -> impl Iterator<Item = (IpNet, IdentityId)> + '_ {
        self.prefixes.iter().map(|(prefix, id)| (*prefix, *id))
    }

    /// Removes prefixes that are not wanted any more.
    pub(super) fn retain_prefixes(&mut self, keep: impl Fn(&IpNet, &IdentityId) -> bool) {
        self.prefixes.retain(|prefix, id| keep(prefix, id));
        self.lengths = self.prefixes.keys().map(IpNet::prefix_len).collect();
    }

    pub(super) fn is_empty(&self) -> bool {
        self.endpoints.is_empty() && self.prefixes.is_empty()
    }

    pub(super) fn client(&self, client: IpAddr) -> QueryClient {
        match self.endpoints.get(&client) {
            Some((id, identity)) => QueryClient::Endpoint {
                id: *id,
                identity: *identity,
                ifindex: 0,
            },
            None => QueryClient::Unknown,
        }
    }

    /// Identity of `server` by the longest prefix of at most `limit` bits.
    pub(super) fn server(&self, server: IpAddr, limit: u8) -> Option<IdentityId> {
        self.longest(server, limit).map(|(_, identity)| identity)
    }

    /// The longest prefix of at most `limit` bits that covers `server`. The entry of a local
    /// endpoint counts before any prefix.
    pub(super) fn longest(&self, server: IpAddr, limit: u8) -> Option<(u8, IdentityId)> {
        let full = full_length(server);
        if limit >= full
            && let Some((_, identity)) = self.endpoints.get(&server)
        {
            return Some((full, *identity));
        }
        self.lengths
            .range(..=limit.min(full))
            .rev()
            .find_map(|len| {
                let prefix = IpNet::new(server, *len).ok()?.trunc();
                Some((*len, *self.prefixes.get(&prefix)?))
            })
    }

    /// The endpoints, in the same form as from `cilium_lxc`.
    pub(super) fn instances(&self, into: &mut Instances) {
        for (ip, (id, identity)) in &self.endpoints {
            into.entry(*id)
                .or_insert_with(|| Instance::new(0, *identity))
                .addresses
                .insert(*ip);
        }
    }
}

/// Number of bits of a prefix that covers only one address.
pub(super) fn full_length(ip: IpAddr) -> u8 {
    if ip.is_ipv4() { 32 } else { 128 }
}
