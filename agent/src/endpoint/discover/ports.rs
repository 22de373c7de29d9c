//! Ports of the node's bridges.

use std::{collections::BTreeSet, io, pin::pin};

use rtnetlink::{
    Handle,
    packet_route::link::{LinkAttribute, LinkMessage},
};
use tokio_stream::StreamExt as _;

use super::{behind::leads_elsewhere, links};

/// A port of a bridge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Port {
    pub(crate) index: u32,
    /// Index of its bridge.
    pub(crate) bridge: u32,
    /// It is one end of a pair of interfaces whose other end is in another namespace.
    pub(crate) leads_elsewhere: bool,
}

/// The ports of all bridges of this namespace.
///
/// # Errors
/// The kernel could not be asked.
pub(crate) async fn ports(handle: &Handle) -> io::Result<BTreeSet<Port>> {
    let mut links = pin!(handle.link().get().execute());
    let mut ports = BTreeSet::new();
    while let Some(link) = links.next().await {
        let link = link.map_err(|error| links::failed(&error))?;
        ports.extend(port(&link));
    }
    Ok(ports)
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
