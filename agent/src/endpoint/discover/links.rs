//! Links and addresses of interfaces, and both ends of a pod's link.

use std::{
    io,
    net::{IpAddr, Ipv6Addr},
    pin::pin,
};

use agent_core::datapath::link::Link;
use daemon::lookup::Lookup;

use ipnet::IpNet;
use rtnetlink::{
    Error, Handle,
    packet_route::{
        address::{AddressAttribute, AddressFlags, AddressMessage},
        link::LinkMessage,
    },
};
use tokio_stream::StreamExt as _;

use super::attributes::{mac_of, name_of};

/// The interface with a number.
pub(super) async fn link(handle: &Handle, index: u32) -> Lookup<LinkMessage> {
    let mut links = pin!(handle.link().get().match_index(index).execute());
    Lookup::of_interface(match links.next().await {
        Some(link) => link.map_err(|error| failed(&error)),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    })
}

/// The interface with a name.
pub(super) async fn named(handle: &Handle, name: &str) -> Lookup<LinkMessage> {
    let query = handle.link().get().match_name(name.to_owned());
    let mut links = pin!(query.execute());
    Lookup::of_interface(match links.next().await {
        Some(link) => link.map_err(|error| failed(&error)),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    })
}

/// Name of an interface, for people.
pub(super) async fn name(handle: &Handle, index: u32) -> String {
    let link = link(handle, index).await.found();
    link.and_then(|link| name_of(&link))
        .unwrap_or_else(|| format!("interface {index}"))
}

/// The kernel's own error, if it caused the failure.
pub(super) fn failed(error: &Error) -> io::Error {
    match error {
        Error::NetlinkError(message) => io::Error::from_raw_os_error(-message.raw_code()),
        other => io::Error::other(other.to_string()),
    }
}

/// Addresses of an interface with the lengths of their prefixes, except addresses that another
/// machine on the link uses (duplicate address detection).
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

pub(super) fn address_of(message: &AddressMessage) -> Option<IpAddr> {
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

/// Both ends of a pod's link.
pub(super) struct Ends {
    /// Index of the host-side interface.
    pub(super) host_side: u32,
    pub(super) pod_mac: [u8; 6],
    pub(super) node_mac: [u8; 6],
    /// The bridge that the host-side interface is a port of.
    pub(super) bridge: Option<u32>,
}

/// The link of a pod. `claimed` are the pod's link-local addresses, `addresses` are its other addresses.
pub(super) async fn of(
    handle: &Handle,
    ends: &Ends,
    claimed: &[Ipv6Addr],
    addresses: &[IpAddr],
) -> io::Result<Link> {
    let bridge = ends.bridge;
    let bridge_mac = match bridge {
        Some(index) => match link(handle, index).await {
            Lookup::Found(link) => mac_of(&link),
            Lookup::Gone => None,
            Lookup::Unknown(error) => return Err(error),
        },
        None => None,
    };
    let of_node = self::addresses(handle, bridge.unwrap_or(ends.host_side)).await;
    let of_node = of_node.map_err(|error| failed(&error))?;
    let mut present = Vec::new();
    let (mut on_link_bits, mut on_link_bits4) = (0, 0);
    for (ip, bits) in of_node {
        if let IpAddr::V6(ip) = ip
            && ip.is_unicast_link_local()
        {
            present.push(ip);
        } else if bridge.is_some()
            && let Ok(net) = IpNet::new(ip, bits)
            && addresses.iter().any(|own| net.contains(own))
        {
            match ip {
                IpAddr::V4(_) => on_link_bits4 = bits,
                IpAddr::V6(_) => on_link_bits = bits,
            }
        }
    }
    let node = Link::of_node(bridge_mac.unwrap_or(ends.node_mac), &present);
    Ok(Link {
        pod: Link::of_pod(ends.pod_mac, claimed, &node),
        node,
        bridge_mac,
        on_link_bits,
        on_link_bits4,
    })
}
