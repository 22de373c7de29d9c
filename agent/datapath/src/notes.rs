//! Removes entries of redirected connections after their endpoint was removed.
//!
//! `from_pod` maintains the entries of its pod. After the program is removed, packets of the pod to
//! a server on this node would still go to the proxy, which refuses them.

use std::{collections::HashSet, net::Ipv6Addr};

use shared_maps::{
    FAMILY_IPV6,
    lxc::{LxcKey, LxcValue},
    redirect::{self, RedirectKey, RedirectValue},
    user::{Access, Globals, Map, MapError, MapKind},
};

/// Removes the entries (notes) of pods that are no longer in `lxc`.
pub(super) fn sweep(globals: &Globals, lxc: &Map<LxcKey, LxcValue>) -> Result<(), MapError> {
    let endpoints = lxc.entries()?.found.into_iter();
    let addresses: HashSet<_> = endpoints.map(|(key, _)| (key.ip, key.family)).collect();
    let notes: Map<RedirectKey, RedirectValue> = Map::open(
        &globals.path(redirect::NAME),
        MapKind::LruHash,
        Access::ReadWrite,
    )?;
    for (key, _) in notes.entries()?.found {
        if !addresses.contains(&(key.pod, key.family)) && !is_link_local(&key) {
            notes.remove(&key)?;
        }
    }
    Ok(())
}

/// A pod's link-local address is in no table. Its servers are routers on its link, and the note
/// is of no use to another pod.
fn is_link_local(key: &RedirectKey) -> bool {
    key.family == FAMILY_IPV6 && Ipv6Addr::from(key.pod).is_unicast_link_local()
}
