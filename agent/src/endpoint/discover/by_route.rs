//! Which interface leads to a pod, by the node's routes alone: no namespace is entered.

use std::{io, net::IpAddr};

use daemon::lookup::Lookup;
use rtnetlink::{
    Handle,
    packet_route::link::{InfoKind, LinkMessage},
};

use super::{
    attributes::{name_of, peer_of},
    behind::{kind, leads_elsewhere},
    bridge, links,
};

/// The way to an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// One end of a pair of interfaces whose other end is in another namespace.
    Pair { index: u32, name: String },
    /// A bridge. Which of its ports leads to the address cannot be told by routes.
    Bridge { name: String },
    /// An interface that leads to no pod of this node.
    Elsewhere {
        name: String,
        /// As the kernel calls it.
        kind: String,
    },
    /// There is no route.
    Nowhere,
}

/// The way that packets for `address` take now.
///
/// # Errors
/// The kernel could not be asked; this says nothing about the way.
pub(crate) async fn way_to(handle: &Handle, address: IpAddr) -> io::Result<Way> {
    let Some(out) = bridge::route_to(handle, address).await? else {
        return Ok(Way::Nowhere);
    };
    let Some(link) = found(handle, out).await? else {
        return Ok(Way::Nowhere);
    };
    let name = name_of(&link).unwrap_or_else(|| format!("interface {out}"));
    if leads_elsewhere(&link) {
        return Ok(Way::Pair { index: out, name });
    }
    if is_bridge(&link) {
        return Ok(Way::Bridge { name });
    }
    // A VLAN of a bridge.
    if let Some(below) = peer_of(&link)
        && found(handle, below).await?.as_ref().is_some_and(is_bridge)
    {
        return Ok(Way::Bridge { name });
    }
    let kind = kind(&link);
    Ok(Way::Elsewhere { name, kind })
}

async fn found(handle: &Handle, index: u32) -> io::Result<Option<LinkMessage>> {
    match links::link(handle, index).await {
        Lookup::Found(link) => Ok(Some(link)),
        Lookup::Gone => Ok(None),
        Lookup::Unknown(error) => Err(error),
    }
}

fn is_bridge(link: &LinkMessage) -> bool {
    kind(link) == InfoKind::Bridge.to_string()
}
