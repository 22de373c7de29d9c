//! Which interface leads to a pod, by the node's routes alone: no namespace is entered.

use std::{io, net::IpAddr};

use agent_datapath::route_query;
use daemon::lookup::Lookup;
use rtnetlink::{
    Handle,
    packet_route::{
        link::{InfoKind, LinkMessage},
        route::{RouteAttribute, RouteMessage},
    },
};

use super::{
    attributes::{name_of, peer_of},
    behind::{kind, leads_elsewhere},
    links,
};

/// The way to an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// One end of a pair of interfaces whose other end is in another namespace.
    Pair { index: u32, name: String },
    /// A bridge. Routes do not show which of its ports leads to the address.
    Bridge {
        /// Index of the bridge itself: its ports' packets to each other come by this interface.
        index: u32,
        name: String,
    },
    /// An interface that leads to no pod of this node.
    Elsewhere {
        name: String,
        /// Kind of the interface, as the kernel calls it.
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
    let Some(route) = route_query::entry(handle, address).await? else {
        return Ok(Way::Nowhere);
    };
    let mut attributes = route.attributes.iter();
    let out = attributes.find_map(|attribute| match attribute {
        RouteAttribute::Oif(index) => Some(*index),
        _ => None,
    });
    let Some(out) = out else {
        return Ok(Way::Nowhere);
    };
    let Some(link) = found(handle, out).await? else {
        return Ok(Way::Nowhere);
    };
    let name = name_of(&link).unwrap_or_else(|| format!("interface {out}"));
    let elsewhere = |name| Way::Elsewhere {
        name,
        kind: kind(&link),
    };
    if is_by_gateway(&route) {
        return Ok(elsewhere(name));
    }
    // If the node is itself a container, many addresses are behind its uplink, which is also such a pair.
    if leads_elsewhere(&link) && is_of_one(&route, address) {
        return Ok(Way::Pair { index: out, name });
    }
    if is_bridge(&link) {
        return Ok(Way::Bridge { index: out, name });
    }
    // The interface is a VLAN of a bridge.
    if let Some(below) = peer_of(&link)
        && found(handle, below).await?.as_ref().is_some_and(is_bridge)
    {
        return Ok(Way::Bridge { index: below, name });
    }
    Ok(elsewhere(name))
}

/// Whether another machine passes the packets on.
fn is_by_gateway(route: &RouteMessage) -> bool {
    let mut attributes = route.attributes.iter();
    attributes.any(|attribute| {
        matches!(
            attribute,
            RouteAttribute::Gateway(_) | RouteAttribute::Via(_)
        )
    })
}

/// Whether a route is for this address alone.
fn is_of_one(route: &RouteMessage, address: IpAddr) -> bool {
    let bits = match address {
        IpAddr::V4(_) => 32,
        IpAddr::V6(_) => 128,
    };
    route.header.destination_prefix_length == bits
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
