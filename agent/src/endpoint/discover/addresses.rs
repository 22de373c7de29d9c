//! Which addresses of a pod's interface count.
//!
//! A pod with NET_ADMIN gives its interface any address that it likes. An address counts only if
//! this node says that the pod has it:
//!
//! | host side | an address counts if |
//! |---|---|
//! | routed | the node routes it to the host-side interface |
//! | port of a bridge (or of another master) | it is named, or was there when the endpoint was added. For an endpoint that is found by the name of a container or interface: if the node routes it to the bridge |
//!
//! The same rules decide whether the MAC of the pod's interface counts.
//!
//! In addition, the core refuses addresses of the node and of other endpoints.

use std::{
    io,
    net::{IpAddr, Ipv6Addr},
};

use agent_datapath::route_query;
use rtnetlink::{
    Handle,
    packet_route::route::{RouteAttribute, RouteMessage, RouteType},
};

/// Maximum addresses of one interface that are looked up in the node's routes.
const MOST: usize = 64;

/// Data about an endpoint's addresses from before its interface is read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Claims {
    /// Addresses that the endpoint's document, or the command that added it, names.
    pub named: Vec<IpAddr>,
    /// Where the endpoint was found before.
    pub known: Option<Known>,
    /// The agent finds the endpoint by the name of a container or interface, maybe long after its start. On a bridge
    /// the pod could have chosen any address meanwhile.
    pub by_itself: bool,
}

/// Where an endpoint was found before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    /// Index of its host-side interface.
    pub ifindex: u32,
    /// Accepted addresses of the pod's interface, without link-local ones.
    pub addresses: Vec<IpAddr>,
    /// Accepted IPv6 link-local addresses of the pod's interface.
    pub link_locals: Vec<Ipv6Addr>,
    /// The MAC that counted; all zero if no MAC counted.
    pub mac: [u8; 6],
}

/// How packets for a pod reach the host side of its interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HostSide {
    /// Packets reach it by a route of this node.
    Routed,
    /// Packets reach it by a bridge, or by another master of the interface.
    Port,
}

impl Claims {
    /// Addresses that may count at the host-side interface `ifindex`, the likeliest first.
    /// `present` is what the pod's interface has now.
    pub(super) fn candidates(
        &self,
        side: HostSide,
        ifindex: u32,
        present: &[IpAddr],
    ) -> Vec<IpAddr> {
        if !self.named.is_empty() {
            return self.named.clone();
        }
        let known = self.known.as_ref().filter(|known| known.ifindex == ifindex);
        match (side, known) {
            (HostSide::Port, Some(known)) => known.addresses.clone(),
            (HostSide::Port, None) => present.to_vec(),
            (HostSide::Routed, known) => {
                let known = known.map_or(&[][..], |known| &known.addresses);
                let mut found = present.to_vec();
                // The pod chooses the order of its addresses, so an address that counted before goes first.
                found.sort_by_key(|address| (address.is_ipv6(), !known.contains(address)));
                found
            }
        }
    }
}

impl Claims {
    /// Whether an address counts on a bridge only if the node routes it there.
    pub(super) fn must_be_led(&self, ifindex: u32) -> bool {
        let is_known = self
            .known
            .as_ref()
            .is_some_and(|known| known.ifindex == ifindex);
        self.by_itself && self.named.is_empty() && !is_known
    }

    /// Link-local addresses that may count; `present` is what the pod's interface has now. Behind a bridge, an
    /// address that the pod chooses later may be that of another pod or of the gateway.
    pub(super) fn link_locals(
        &self,
        side: HostSide,
        ifindex: u32,
        present: &[Ipv6Addr],
    ) -> Vec<Ipv6Addr> {
        let known = self.known.as_ref().filter(|known| known.ifindex == ifindex);
        match (side, known) {
            (HostSide::Port, Some(known)) => known.link_locals.clone(),
            _ => present.to_vec(),
        }
    }

    /// The MAC that counts; `present` is what the pod's interface has now. Behind a bridge, a MAC that the pod
    /// chooses later may be that of another machine, whose frames the bridge would then send to the pod.
    pub(super) fn mac(&self, side: HostSide, ifindex: u32, present: [u8; 6]) -> [u8; 6] {
        let known = self.known.as_ref().filter(|known| known.ifindex == ifindex);
        match (side, known) {
            (HostSide::Port, Some(known)) if known.mac != [0; 6] => known.mac,
            _ => present,
        }
    }
}

/// The first address of each family that the node routes to the interface `ifindex`.
pub(super) async fn routed_to(
    handle: &Handle,
    ifindex: u32,
    candidates: &[IpAddr],
) -> io::Result<Vec<IpAddr>> {
    let mut found: Vec<IpAddr> = Vec::new();
    for address in candidates.iter().take(MOST) {
        let settled = |found: &IpAddr| found.is_ipv4() == address.is_ipv4();
        if found.iter().any(settled) {
            continue;
        }
        let route = route_query::answer(handle, *address).await?;
        if route.is_some_and(|route| leads_to(&route, ifindex)) {
            found.push(*address);
        }
    }
    Ok(found)
}

fn leads_to(route: &RouteMessage, ifindex: u32) -> bool {
    let out = |attribute: &RouteAttribute| *attribute == RouteAttribute::Oif(ifindex);
    route.header.kind == RouteType::Unicast && route.attributes.iter().any(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn known(ifindex: u32, address: &str) -> Claims {
        Claims {
            named: Vec::new(),
            by_itself: false,
            known: Some(Known {
                ifindex,
                addresses: vec![ip(address)],
                link_locals: vec!["fe80::a".parse().unwrap()],
                mac: [2, 0, 0, 0, 0, 7],
            }),
        }
    }

    #[test]
    fn on_a_bridge_port_a_link_local_address_that_is_added_later_does_not_count() {
        let present = ["fe80::1".parse().unwrap(), "fe80::a".parse().unwrap()];
        let known = known(7, "10.0.0.7");
        assert_eq!(known.link_locals(HostSide::Port, 7, &present), present[1..]);
        assert_eq!(known.link_locals(HostSide::Routed, 7, &present), present);
        assert_eq!(known.link_locals(HostSide::Port, 8, &present), present);
    }

    #[test]
    fn on_a_bridge_port_a_mac_that_the_pod_chooses_later_does_not_count() {
        let (before, later) = ([2, 0, 0, 0, 0, 7], [2, 0, 0, 0, 0, 8]);
        let mut claims = known(7, "10.0.0.7");
        assert_eq!(claims.mac(HostSide::Port, 7, later), before);
        assert_eq!(claims.mac(HostSide::Routed, 7, later), later);
        assert_eq!(claims.mac(HostSide::Port, 8, later), later);
        claims.known.as_mut().unwrap().mac = [0; 6];
        assert_eq!(claims.mac(HostSide::Port, 7, later), later);
    }

    #[test]
    fn on_a_bridge_port_an_address_that_is_added_later_does_not_count() {
        let present = [ip("10.0.0.53"), ip("10.0.0.7")];
        let candidates = known(7, "10.0.0.7").candidates(HostSide::Port, 7, &present);
        assert_eq!(candidates, [ip("10.0.0.7")]);
        // The same holds if the pod removed its own address.
        let candidates = known(7, "10.0.0.7").candidates(HostSide::Port, 7, &present[..1]);
        assert_eq!(candidates, [ip("10.0.0.7")]);
        // Another interface means another pod: the addresses that it has when it is added count.
        let candidates = known(6, "10.0.0.7").candidates(HostSide::Port, 7, &present);
        assert_eq!(candidates, present);
    }

    #[test]
    fn an_address_that_counted_or_is_named_needs_no_route_to_the_bridge() {
        let mut claims = known(7, "10.0.0.7");
        assert!(!claims.must_be_led(8), "its administrator added it");
        claims.by_itself = true;
        assert!(claims.must_be_led(8));
        assert!(!claims.must_be_led(7), "it counted");
        claims.named.push(ip("10.0.0.9"));
        assert!(!claims.must_be_led(8));
    }

    #[test]
    fn named_addresses_are_the_only_ones_that_count() {
        let claims = Claims {
            named: vec![ip("10.0.0.9")],
            ..known(7, "10.0.0.7")
        };
        for side in [HostSide::Port, HostSide::Routed] {
            let candidates = claims.candidates(side, 7, &[ip("10.0.0.53")]);
            assert_eq!(candidates, [ip("10.0.0.9")]);
        }
    }

    #[test]
    fn the_address_that_counted_is_looked_up_first() {
        let present = [ip("10.0.0.53"), ip("10.0.0.7"), ip("fd00::7")];
        let candidates = known(7, "10.0.0.7").candidates(HostSide::Routed, 7, &present);
        assert_eq!(candidates, [ip("10.0.0.7"), ip("10.0.0.53"), ip("fd00::7")]);
    }
}
