//! The end of a pod's interface in the node's namespace.

use std::{io, net::IpAddr};

use agent_core::endpoint::spec::PodInterface;

use super::{
    DiscoverError, Netns,
    addresses::{Claims, HostSide, routed_to},
    attributes::{mac_of, name_of},
    behind, bridge, links,
    pod_side::PodSide,
};

pub(super) struct HostInterface {
    /// The interface, with the accepted MAC of the pod's side.
    pub(super) interface: PodInterface,
    /// Addresses that were considered.
    pub(super) candidates: Vec<IpAddr>,
    /// Addresses that count.
    pub(super) addresses: Vec<IpAddr>,
    pub(super) foreign_master: Option<String>,
}

/// Finds the host side of a pod's interface, and which of its addresses count.
pub(super) async fn host_side(
    handle: &rtnetlink::Handle,
    netns: &Netns,
    ifname: &str,
    inside: &PodSide,
    claims: &Claims,
) -> Result<HostInterface, DiscoverError> {
    let no_peer = || DiscoverError::NoPeer {
        netns: netns.clone(),
        ifname: ifname.to_owned(),
        kind: inside.kind.clone(),
    };
    let failed = |error: io::Error| DiscoverError::netlink(netns, error);
    let link = behind::pair_to(handle, inside.peer, netns, inside.index).await;
    let link = link.map_err(failed)?.ok_or_else(no_peer)?;
    let master = bridge::master(&link);
    let side = master.map_or(HostSide::Routed, |_| HostSide::Port);
    let candidates = claims.candidates(side, inside.peer, &inside.addresses);
    let mut addresses = match side {
        HostSide::Port => candidates.clone(),
        HostSide::Routed => {
            let routed = routed_to(handle, inside.peer, &candidates).await;
            routed.map_err(failed)?
        }
    };
    let bridge = bridge::of(&link);
    if let Some(bridge) = bridge {
        let led = led_to(handle, netns, ifname, bridge, &addresses).await?;
        if claims.must_be_led(inside.peer) {
            addresses = led;
        }
    }
    let foreign_master = match (master, bridge) {
        (Some(master), None) => Some(links::name(handle, master).await),
        _ => None,
    };
    let claimed = claims.link_locals(side, inside.peer, &inside.link_locals);
    let ends = links::Ends {
        host_side: inside.peer,
        pod_mac: claims.mac(side, inside.peer, inside.mac),
        node_mac: mac_of(&link).ok_or_else(no_peer)?,
        bridge,
    };
    let found = links::of(handle, &ends, &claimed, &addresses).await;
    Ok(HostInterface {
        interface: PodInterface {
            ifindex: inside.peer,
            ifname: name_of(&link).ok_or_else(no_peer)?,
            mac: ends.pod_mac,
            node_mac: ends.node_mac,
            on_bridge: bridge.is_some(),
            link: found.map_err(failed)?,
        },
        candidates,
        addresses,
        foreign_master,
    })
}

/// Addresses that the node reaches through the bridge. Fails if there are none.
async fn led_to(
    handle: &rtnetlink::Handle,
    netns: &Netns,
    ifname: &str,
    bridge: u32,
    addresses: &[IpAddr],
) -> Result<Vec<IpAddr>, DiscoverError> {
    let led = bridge::led_to(handle, bridge, addresses).await;
    let led = led.map_err(|error| DiscoverError::netlink(netns, error))?;
    if addresses.is_empty() || !led.is_empty() {
        return Ok(led);
    }
    Err(DiscoverError::BridgeWithoutAddress {
        netns: netns.clone(),
        ifname: ifname.to_owned(),
        bridge: links::name(handle, bridge).await,
    })
}
