//! Ports of the node's bridges, and UDP ports of its tunnels.

use std::{
    collections::BTreeSet,
    io,
    net::{Ipv4Addr, SocketAddrV4},
    pin::pin,
};

use nix::{
    ifaddrs::{InterfaceAddress, getifaddrs},
    sys::socket::SockaddrStorage,
};
use rtnetlink::{
    Handle,
    packet_route::link::{
        InfoBareUdp, InfoBridge, InfoData, InfoGeneve, InfoVxlan, LinkAttribute, LinkInfo,
        LinkMessage,
    },
};
use tokio_stream::StreamExt as _;

use super::{
    behind::{infos, leads_elsewhere},
    links,
};

/// A port of a bridge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Port {
    pub(crate) index: u32,
    /// Index of its bridge.
    pub(crate) bridge: u32,
    /// Whether the port is one end of a pair of interfaces whose other end is in another namespace.
    pub(crate) leads_elsewhere: bool,
}

/// The ports of all bridges of this namespace, and the UDP ports at which its tunnels receive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ports {
    pub(crate) of_bridges: BTreeSet<Port>,
    pub(crate) of_tunnels: BTreeSet<u16>,
    /// Indexes of bridges that filter VLANs.
    pub(crate) vlan_bridges: BTreeSet<u32>,
    /// Broadcast addresses of the networks of this namespace's interfaces.
    pub(crate) broadcasts: BTreeSet<Ipv4Addr>,
}

impl Ports {
    /// Reads ports, tunnels and addresses of interfaces from the kernel.
    ///
    /// # Errors
    /// The kernel could not be asked.
    pub(crate) async fn list(handle: &Handle) -> io::Result<Self> {
        let mut links = pin!(handle.link().get().execute());
        let mut found = Self {
            broadcasts: getifaddrs()?
                .filter_map(|found| broadcast(&found))
                .collect(),
            ..Self::default()
        };
        while let Some(link) = links.next().await {
            let link = link.map_err(|error| links::failed(&error))?;
            found.of_bridges.extend(port(&link));
            found.of_tunnels.extend(infos(&link).filter_map(tunnel));
            if filters_vlans(&link) {
                found.vlan_bridges.insert(link.header.index);
            }
        }
        Ok(found)
    }
}

/// The last address of an interface's network. A network of one or two addresses has no broadcast address.
fn broadcast(found: &InterfaceAddress) -> Option<Ipv4Addr> {
    let of = |address: Option<&SockaddrStorage>| {
        Some(
            SocketAddrV4::from(*address?.as_sockaddr_in()?)
                .ip()
                .to_bits(),
        )
    };
    let host = !of(found.netmask.as_ref())?;
    (host > 1).then_some(Ipv4Addr::from_bits(of(found.address.as_ref())? | host))
}

/// Whether a bridge filters VLANs: then it adds tags to frames, and takes them off.
pub(crate) fn filters_vlans(link: &LinkMessage) -> bool {
    let on = InfoBridge::VlanFiltering(true);
    infos(link).any(|info| match info {
        LinkInfo::Data(InfoData::Bridge(parts)) => parts.contains(&on),
        _ => false,
    })
}

/// The UDP port of a tunnel.
fn tunnel(info: &LinkInfo) -> Option<u16> {
    let LinkInfo::Data(data) = info else {
        return None;
    };
    match data {
        InfoData::Vxlan(parts) => parts.iter().find_map(|part| match part {
            InfoVxlan::Port(port) => Some(*port),
            _ => None,
        }),
        InfoData::Geneve(parts) => parts.iter().find_map(|part| match part {
            InfoGeneve::Port(port) => Some(*port),
            _ => None,
        }),
        InfoData::BareUdp(parts) => parts.iter().find_map(|part| match part {
            InfoBareUdp::Port(port) => Some(*port),
            _ => None,
        }),
        _ => None,
    }
}

/// The port, if another interface controls the link. Members of a bond or a VRF are included. This does no harm,
/// because no frame of a bridge names them.
fn port(link: &LinkMessage) -> Option<Port> {
    let mut attributes = link.attributes.iter();
    let bridge = attributes.find_map(|attribute| match attribute {
        LinkAttribute::Controller(bridge) => Some(*bridge),
        _ => None,
    })?;
    Some(Port {
        index: link.header.index,
        bridge,
        leads_elsewhere: leads_elsewhere(link),
    })
}
