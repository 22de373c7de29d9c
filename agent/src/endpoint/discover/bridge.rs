//! Host-side interfaces that are ports of a bridge (podman, docker, LXC, flannel, k3s).
//!
//! A bridge forwards frames for a neighbour past the IP stack. `from_pod` therefore addresses redirected packets to
//! the node, and the proxy's answers go out through the bridge: the node must have an address of the pods' network on
//! it.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
    pin::pin,
};

use agent_datapath::route_query;
use daemon::lookup::Lookup;
use rtnetlink::{
    Handle,
    packet_route::{
        link::{InfoPortKind, LinkAttribute, LinkInfo, LinkMessage},
        route::RouteAttribute,
    },
};
use tokio_stream::StreamExt as _;

use super::{
    DiscoverError, Netns,
    attributes::{name_of, peer_of},
    behind::leads_elsewhere,
    links, on_thread,
};

/// Index of the bridge that has a link as a port.
pub(super) fn of(link: &LinkMessage) -> Option<u32> {
    let mut bridge = None;
    let mut is_port = false;
    for attribute in &link.attributes {
        match attribute {
            LinkAttribute::Controller(index) => bridge = Some(*index),
            LinkAttribute::LinkInfo(infos) => {
                is_port |= infos.contains(&LinkInfo::PortKind(InfoPortKind::Bridge));
            }
            _ => {}
        }
    }
    bridge.filter(|_| is_port)
}

/// Index of the interface that a link is a port of: a bridge, or for example a switch of OVS.
pub(super) fn master(link: &LinkMessage) -> Option<u32> {
    link.attributes
        .iter()
        .find_map(|attribute| match attribute {
            LinkAttribute::Controller(index) => Some(*index),
            _ => None,
        })
}

/// The part of `addresses` to which the node sends packets through the bridge, or through a VLAN of it.
pub(super) async fn led_to(
    handle: &Handle,
    bridge: u32,
    addresses: &[IpAddr],
) -> io::Result<Vec<IpAddr>> {
    let mut found = Vec::new();
    for address in addresses {
        let Some(out) = route_to(handle, *address).await? else {
            continue;
        };
        let leads = out == bridge
            || match links::link(handle, out).await {
                Lookup::Found(link) => peer_of(&link) == Some(bridge),
                Lookup::Gone => false,
                Lookup::Unknown(error) => return Err(error),
            };
        if leads {
            found.push(*address);
        }
    }
    Ok(found)
}

/// Index of the interface through which the node reaches an address; `None` if there is no route.
async fn route_to(handle: &Handle, address: IpAddr) -> io::Result<Option<u32>> {
    let found = route_query::answer(handle, address).await?;
    let attributes = found.into_iter().flat_map(|route| route.attributes);
    let mut out = attributes.filter_map(|attribute| match attribute {
        RouteAttribute::Oif(index) => Some(index),
        _ => None,
    });
    Ok(out.next())
}

/// Ports that lead to another namespace, by number and name, by the name of their bridge.
pub(crate) fn ports_by_bridge() -> Result<BTreeMap<String, Vec<(u32, String)>>, DiscoverError> {
    let node = Netns::Pid(std::process::id());
    on_thread(&node.clone(), async move |handle| {
        let mut names = BTreeMap::new();
        let mut ports = Vec::new();
        let mut links = pin!(handle.link().get().execute());
        while let Some(link) = links.next().await {
            let link = link.map_err(|error| DiscoverError::netlink(&node, error))?;
            let Some(name) = name_of(&link) else {
                continue;
            };
            if let Some(bridge) = of(&link).filter(|_| leads_elsewhere(&link)) {
                ports.push((bridge, link.header.index, name.clone()));
            }
            names.insert(link.header.index, name);
        }
        let mut found: BTreeMap<String, Vec<(u32, String)>> = BTreeMap::new();
        for (bridge, index, name) in ports {
            if let Some(bridge) = names.get(&bridge) {
                found.entry(bridge.clone()).or_default().push((index, name));
            }
        }
        Ok(found)
    })
}

/// Every interface of this node that is a port of a bridge.
pub(crate) fn ports() -> Result<BTreeSet<u32>, DiscoverError> {
    // The namespace is only named in errors; it is not read.
    let node = Netns::Pid(std::process::id());
    on_thread(&node, {
        let node = node.clone();
        async move |handle| {
            let mut found = BTreeSet::new();
            let mut links = pin!(handle.link().get().execute());
            while let Some(link) = links.next().await {
                let link = link.map_err(|error| DiscoverError::netlink(&node, error))?;
                if of(&link).is_some() {
                    found.insert(link.header.index);
                }
            }
            Ok(found)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(kind: InfoPortKind) -> LinkMessage {
        let mut link = LinkMessage::default();
        link.attributes = vec![
            LinkAttribute::Controller(3),
            LinkAttribute::LinkInfo(vec![LinkInfo::PortKind(kind)]),
        ];
        link
    }

    #[test]
    fn a_port_of_open_vswitch_has_a_master_that_is_no_bridge() {
        let bridged = port(InfoPortKind::Bridge);
        assert_eq!((master(&bridged), of(&bridged)), (Some(3), Some(3)));
        let switched = port(InfoPortKind::Other("openvswitch".to_owned()));
        assert_eq!((master(&switched), of(&switched)), (Some(3), None));
        let routed = LinkMessage::default();
        assert_eq!((master(&routed), of(&routed)), (None, None));
    }
}
