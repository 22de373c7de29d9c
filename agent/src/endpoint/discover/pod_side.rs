//! The end of a pod's interface in the pod's namespace.

use std::{
    io,
    net::{IpAddr, Ipv6Addr},
};

use super::{
    DiscoverError, Netns,
    attributes::{mac_of, name_of, peer_of},
    behind,
    inside::Inside,
    present::Present,
};

#[derive(Clone)]
pub(super) struct PodSide {
    pub(super) index: u32,
    pub(super) peer: u32,
    pub(super) mac: [u8; 6],
    pub(super) addresses: Vec<IpAddr>,
    pub(super) link_locals: Vec<Ipv6Addr>,
    pub(super) kind: String,
    /// Further interfaces that lead to another namespace.
    pub(super) others: Vec<String>,
}

/// Finds the pod's interface, in its namespace.
pub(super) async fn pod_side(
    inside: &Inside,
    netns: &Netns,
    ifname: &str,
) -> Result<PodSide, DiscoverError> {
    let failed = |error: io::Error| DiscoverError::netlink(netns, error);
    let mut present = Present::default();
    let mut others = Vec::new();
    let mut found = None;
    let read = inside.each_link(|link| {
        let name = name_of(&link).unwrap_or_default();
        if inside.is_end(&link, ifname) {
            found = Some(link);
        } else {
            if behind::leads_elsewhere(&link) && others.len() < Present::NAMED {
                others.push(name.clone());
            }
            present.add(name);
        }
    });
    read.await.map_err(failed)?;
    let link = found.ok_or_else(|| DiscoverError::NoInterface {
        netns: netns.clone(),
        ifname: ifname.to_owned(),
        present: present.to_string(),
    })?;
    let kind = behind::kind(&link);
    let no_peer = || DiscoverError::NoPeer {
        netns: netns.clone(),
        ifname: ifname.to_owned(),
        kind: kind.clone(),
    };
    let peer = peer_of(&link).ok_or_else(no_peer)?;
    let mac = mac_of(&link).ok_or_else(no_peer)?;
    let index = link.header.index;
    let mut addresses = Vec::new();
    let mut link_locals = Vec::new();
    for ip in inside.addresses(index).await.map_err(failed)? {
        match ip {
            IpAddr::V6(v6) if v6.is_unicast_link_local() => link_locals.push(v6),
            ip if !is_link_local(ip) => addresses.push(ip),
            _ => {}
        }
    }
    addresses.sort_by_key(|ip| ip.is_ipv6());
    addresses.dedup();
    Ok(PodSide {
        index,
        peer,
        mac,
        addresses,
        link_locals,
        kind,
        others,
    })
}

fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}
