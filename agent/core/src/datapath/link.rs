//! The link between a pod's interface and the node, as neighbour discovery needs it.
//!
//! Messages of neighbour discovery pass without policy. The programs let them speak only for
//! the pod's own addresses, and only to the node or, at a bridge, to neighbours on it.

use std::net::Ipv6Addr;

use serde::{Deserialize, Serialize};
use shared_maps::endpoint::{
    EndpointConfig, LINK_LOCALS, NODE_LINK_LOCALS, interface_id, link_local_of,
};

/// Link-local addresses at both ends of a pod's link, and what its bridge has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// Link-local addresses of the pod's interface that do not follow from its MAC.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pod: Vec<Ipv6Addr>,
    /// The node's link-local addresses on the link.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub node: Vec<Ipv6Addr>,
    /// MAC of the bridge that the host-side interface is a port of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bridge_mac: Option<[u8; 6]>,
    /// Length of the bridge's IPv6 prefix that the pod's address is in; 0 = none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub on_link_bits: u8,
    /// Length of the bridge's IPv4 prefix that the pod's address is in; 0 = none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub on_link_bits4: u8,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives references")]
fn is_zero(bits: &u8) -> bool {
    *bits == 0
}

impl Link {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Link-local addresses of a pod that count: those that do not follow from its MAC, that the
    /// node does not have, and no more than the programs have room for.
    pub fn of_pod(mac: [u8; 6], present: &[Ipv6Addr], node: &[Ipv6Addr]) -> Vec<Ipv6Addr> {
        let made = Ipv6Addr::from(link_local_of(mac));
        distinct(present, LINK_LOCALS, |ip| *ip != made && !node.contains(ip))
    }

    /// The node's link-local addresses: the one that follows from the MAC of its interface, even
    /// before the interface has it, and those that the interface has.
    pub fn of_node(mac: [u8; 6], present: &[Ipv6Addr]) -> Vec<Ipv6Addr> {
        let mut all = vec![Ipv6Addr::from(link_local_of(mac))];
        all.extend(present);
        distinct(&all, NODE_LINK_LOCALS, |_| true)
    }

    /// Writes the link into the constants of the endpoint's programs.
    pub fn configure(&self, config: &mut EndpointConfig) {
        config.on_link_bits = self.on_link_bits;
        config.on_link_bits4 = self.on_link_bits4;
        config.bridge_mac = self.bridge_mac.unwrap_or_default();
        fill(&mut config.link_locals, &self.pod);
        fill(&mut config.node_link_locals, &self.node);
    }
}

fn distinct(
    addresses: &[Ipv6Addr],
    limit: usize,
    counts: impl Fn(&Ipv6Addr) -> bool,
) -> Vec<Ipv6Addr> {
    let mut found = Vec::new();
    for ip in addresses {
        let usable = interface_id(ip.octets()).is_some_and(|id| id != [0, 0]);
        if usable && counts(ip) && !found.contains(ip) && found.len() < limit {
            found.push(*ip);
        }
    }
    found
}

fn fill(places: &mut [[u32; 2]], addresses: &[Ipv6Addr]) {
    let ids = addresses.iter().filter_map(|ip| interface_id(ip.octets()));
    for (place, id) in places.iter_mut().zip(ids) {
        *place = id;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];

    fn ip(text: &str) -> Ipv6Addr {
        text.parse().unwrap()
    }

    #[test]
    fn a_pod_s_own_link_local_address_counts_and_the_node_s_does_not() {
        let node = Link::of_node(MAC, &[ip("fe80::1"), ip("fe80::ff:fe00:9")]);
        assert_eq!(node, [ip("fe80::ff:fe00:9"), ip("fe80::1")]);
        let present = [
            ip("fe80::1"),
            ip("fe80::a"),
            ip("fe80::a"),
            ip("fe80::42:ff:fe00:7"),
            ip("fd00::b"),
            ip("fe80:0:0:1::c"),
            ip("fe80::d"),
            ip("fe80::e"),
        ];
        let mac = [0, 0x42, 0, 0, 0, 7];
        let made = Ipv6Addr::from(link_local_of(mac));
        assert_eq!(made, ip("fe80::242:ff:fe00:7"));
        let pod = Link::of_pod([2, 0x42, 0, 0, 0, 7], &present, &node);
        assert_eq!(pod, [ip("fe80::a"), ip("fe80::d")], "at most two");
    }

    #[test]
    fn the_programs_get_the_interface_identifiers() {
        let link = Link {
            pod: vec![ip("fe80::a:b:c:d")],
            node: vec![ip("fe80::1")],
            bridge_mac: Some(MAC),
            on_link_bits: 64,
            on_link_bits4: 24,
        };
        let mut config = EndpointConfig::default();
        link.configure(&mut config);
        let bytes = [0, 0xa, 0, 0xb, 0, 0xc, 0, 0xd];
        let [a, b] = config.link_locals[0];
        assert_eq!([a.to_ne_bytes(), b.to_ne_bytes()].concat(), bytes);
        assert_eq!(config.link_locals[1], [0, 0]);
        assert_eq!(
            config.node_link_locals[0],
            [0, u32::from_ne_bytes([0, 0, 0, 1])]
        );
        assert_eq!((config.on_link_bits, config.on_link_bits4), (64, 24));
        assert_eq!(config.bridge_mac, MAC);
    }
}
