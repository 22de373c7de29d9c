//! Addresses of interfaces, and what the node has on a pod's link.

use std::{
    net::{IpAddr, Ipv6Addr},
    pin::pin,
};

use ipnet::Ipv6Net;
use rtnetlink::{
    Error, Handle,
    packet_route::address::{AddressAttribute, AddressFlags, AddressMessage},
};
use tokio_stream::StreamExt as _;

use super::{PodSide, attributes::mac_of, bridge};
use crate::datapath::link::Link;

/// Addresses of an interface with the lengths of their prefixes, except those that another
/// machine on the link has (duplicate address detection).
pub(super) async fn addresses(handle: &Handle, index: u32) -> Result<Vec<(IpAddr, u8)>, Error> {
    let request = handle.address().get().set_link_index_filter(index);
    let mut messages = pin!(request.execute());
    let mut found = Vec::new();
    while let Some(message) = messages.next().await {
        let message = message?;
        found.extend(address_of(&message).map(|ip| (ip, message.header.prefix_len)));
    }
    Ok(found)
}

fn address_of(message: &AddressMessage) -> Option<IpAddr> {
    let mut local = None;
    let mut peer = None;
    for attribute in &message.attributes {
        match attribute {
            AddressAttribute::Local(ip) => local = Some(*ip),
            AddressAttribute::Address(ip) => peer = Some(*ip),
            AddressAttribute::Flags(flags) if flags.contains(AddressFlags::Dadfailed) => {
                return None;
            }
            _ => {}
        }
    }
    local.or(peer)
}

/// The link of a pod whose host-side interface has the address `node_mac`, or is a port of
/// `bridge`. `claimed` are the pod's link-local addresses, `addresses` its others.
pub(super) async fn of(
    handle: &Handle,
    pod: &PodSide,
    bridge: Option<u32>,
    node_mac: [u8; 6],
    claimed: &[Ipv6Addr],
    addresses: &[IpAddr],
) -> Result<Link, Error> {
    let bridge_mac = match bridge {
        Some(index) => {
            let link = bridge::link(handle, index).await;
            link.as_ref().and_then(mac_of)
        }
        None => None,
    };
    let of_node = self::addresses(handle, bridge.unwrap_or(pod.peer)).await?;
    let mut present = Vec::new();
    let mut on_link_bits = 0;
    for (ip, bits) in of_node {
        let IpAddr::V6(ip) = ip else { continue };
        if ip.is_unicast_link_local() {
            present.push(ip);
        } else if bridge.is_some()
            && let Ok(net) = Ipv6Net::new(ip, bits)
            && addresses
                .iter()
                .any(|own| matches!(own, IpAddr::V6(own) if net.contains(own)))
        {
            on_link_bits = bits;
        }
    }
    let node = Link::of_node(bridge_mac.unwrap_or(node_mac), &present);
    Ok(Link {
        pod: Link::of_pod(pod.mac, claimed, &node),
        node,
        bridge_mac,
        on_link_bits,
    })
}
