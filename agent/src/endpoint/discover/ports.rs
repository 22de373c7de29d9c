//! Ports of the node's bridges, and UDP ports of its tunnels.

use std::{collections::BTreeSet, io, pin::pin};

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
    /// It is one end of a pair of interfaces whose other end is in another namespace.
    pub(crate) leads_elsewhere: bool,
}

/// The ports of all bridges of this namespace, and the UDP ports at which its tunnels receive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ports {
    pub(crate) of_bridges: BTreeSet<Port>,
    pub(crate) of_tunnels: BTreeSet<u16>,
    /// Indexes of bridges that filter VLANs.
    pub(crate) vlan_bridges: BTreeSet<u32>,
}

impl Ports {
    /// Lists them.
    ///
    /// # Errors
    /// The kernel could not be asked.
    pub(crate) async fn list(handle: &Handle) -> io::Result<Self> {
        let mut links = pin!(handle.link().get().execute());
        let mut found = Self::default();
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

/// Interfaces of a bond or a VRF also have one that controls them. They are no ports, and name nothing
/// that frames of a bridge have.
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
