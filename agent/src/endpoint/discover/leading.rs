//! Host-side interfaces that lead to a pod, found even if its addresses are not known.

use std::{collections::BTreeSet, fs, os::unix::fs::MetadataExt as _, path::Path};

use rtnetlink::packet_route::link::{InfoKind, LinkFlags, LinkInfo};

use super::{
    DiscoverError, Netns,
    attributes::{name_of, peer_of},
    behind,
    inside::Inside,
    look_inside, on_thread,
};

/// One end of a pair of interfaces, inside a pod.
struct PodEnd {
    index: u32,
    peer: u32,
    is_named: bool,
}

/// Host-side interfaces that lead to the interface `ifname` of `netns`. If no interface of that name leads here, the
/// pod may have renamed it: then the result has those that lead to any interface of the pod.
pub(crate) fn leading_to(netns: &Netns, ifname: &str) -> Result<BTreeSet<u32>, DiscoverError> {
    if is_own(netns) {
        return Ok(BTreeSet::new());
    }
    let inside = look_inside(netns, {
        let (netns, ifname) = (netns.clone(), ifname.to_owned());
        async move |inside| pod_sides(&inside, &netns, &ifname).await
    })?;
    let of = netns.clone();
    on_thread(netns, async move |handle| {
        let (mut named, mut all) = (BTreeSet::new(), BTreeSet::new());
        for pod_side in inside {
            let pair = behind::pair_to(&handle, pod_side.peer, &of, pod_side.index).await;
            if pair
                .map_err(|error| DiscoverError::netlink(&of, error))?
                .is_some()
            {
                all.insert(pod_side.peer);
                if pod_side.is_named {
                    named.insert(pod_side.peer);
                }
            }
        }
        Ok(if named.is_empty() { all } else { named })
    })
}

/// Names of the interfaces of `netns` by which packets leave it: ends of pairs, interfaces on top of one of another
/// namespace, devices that were moved there, and interfaces whose packets a process or a tunnel elsewhere sends.
pub(crate) fn ways_out(netns: &Netns) -> Result<Vec<String>, DiscoverError> {
    let of = netns.clone();
    look_inside(netns, async move |inside| {
        let mut found = Vec::new();
        let read = inside.each_link(|link| {
            let is_loopback = link.header.flags.contains(LinkFlags::Loopback);
            let is_device = behind::infos(&link).next().is_none() && !is_loopback;
            let is_sent_elsewhere = behind::infos(&link)
                .any(|info| matches!(info, LinkInfo::Kind(InfoKind::Tun | InfoKind::Wireguard)));
            if is_device || is_sent_elsewhere || behind::namespace_behind(&link).is_some() {
                found.extend(name_of(&link));
            }
        });
        read.await
            .map_err(|error| DiscoverError::netlink(&of, error))?;
        Ok(found)
    })
}

/// Whether the host-side interface `first` leads to another namespace than `second`.
pub(crate) fn lead_apart(netns: &Netns, first: u32, second: u32) -> Result<bool, DiscoverError> {
    let of = netns.clone();
    on_thread(netns, async move |handle| {
        let apart = behind::lead_apart(&handle, first, second).await;
        apart.map_err(|error| DiscoverError::netlink(&of, error))
    })
}

async fn pod_sides(
    inside: &Inside,
    netns: &Netns,
    ifname: &str,
) -> Result<Vec<PodEnd>, DiscoverError> {
    let mut found = Vec::new();
    let read = inside.each_link(|link| {
        found.extend(peer_of(&link).map(|peer| PodEnd {
            index: link.header.index,
            peer,
            is_named: inside.is_end(&link, ifname),
        }));
    });
    read.await
        .map_err(|error| DiscoverError::netlink(netns, error))?;
    Ok(found)
}

/// Whether a namespace is the agent's own, whose interfaces lead to pods.
pub(crate) fn is_own(netns: &Netns) -> bool {
    let own = namespace(Path::new("/proc/self/ns/net"));
    own.is_some() && namespace(&netns.path()) == own
}

/// Whether a process certainly or probably has another user namespace than the agent.
pub(crate) fn has_own_users(pid: u32) -> bool {
    let own = namespace(Path::new("/proc/self/ns/user"));
    let of_process = namespace(Path::new(&format!("/proc/{pid}/ns/user")));
    own.is_none() || of_process != own
}

/// Device and inode of a namespace.
fn namespace(path: &Path) -> Option<(u64, u64)> {
    let file = fs::metadata(path).ok()?;
    Some((file.dev(), file.ino()))
}
