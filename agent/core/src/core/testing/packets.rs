//! What happens to packets according to the maps.

use std::net::IpAddr;

use ipnet::IpNet;
use shared_maps::{EndpointId, IdentityId};

use crate::{
    datapath::memory::MemoryDatapath,
    ipcache::table::prefix_of,
    policy::compute::{decide, everyone_at, longest},
};

/// What happens to a packet, the strictest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fate {
    Dropped,
    Proxied,
    Passed,
}

/// A packet of an endpoint.
#[derive(Clone, Copy, Debug)]
pub struct Question {
    pub endpoint: EndpointId,
    pub remote: IpAddr,
    pub direction: u8,
    pub protocol: u8,
    pub port: u16,
}

/// Identity of an address. It is the world's if no entry covers the address.
pub fn identity(datapath: &MemoryDatapath, address: IpAddr) -> IdentityId {
    let covering = datapath.ipcache.iter().filter_map(|(key, value)| {
        let prefix: IpNet = prefix_of(key)?;
        prefix
            .contains(&address)
            .then_some((prefix.prefix_len(), value.sec_identity))
    });
    covering
        .max()
        .map_or(IdentityId::WORLD_IPV4, |(_, id)| IdentityId(id))
}

/// What happens to a packet; `None` if the endpoint has no policy map.
pub fn fate(datapath: &MemoryDatapath, question: Question) -> Option<Fate> {
    let map = datapath.policy.get(&question.endpoint)?;
    let remote = identity(datapath, question.remote);
    let lookup = |id: u32| {
        let entries = map.iter().filter(move |(key, _)| key.sec_label == id);
        let (protocol, port) = match id {
            0 => everyone_at(remote, question.protocol, question.port),
            _ => (question.protocol, question.port),
        };
        longest(entries, question.direction, protocol, port)
    };
    Some(match decide(lookup, remote) {
        None => Fate::Dropped,
        Some((_, value)) if value.is_deny() => Fate::Dropped,
        Some((_, value)) if value.proxy_port.get() != 0 => Fate::Proxied,
        Some(_) => Fate::Passed,
    })
}
