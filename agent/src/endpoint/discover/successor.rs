//! Host-side interfaces that take the place of one that is gone, as when a container is started again.

use std::{collections::BTreeSet, io, net::IpAddr, pin::pin};

use tokio_stream::StreamExt as _;

use super::{DiscoverError, Netns, attributes::name_of, behind, inside, links, on_thread};

/// Interfaces of this node, except `known`, that lead to another namespace, and have the name `ifname` or lead to a
/// namespace that has one of `addresses`. Routes are no help: once the route to a pod is gone, its address is routed
/// to the outside.
pub(crate) fn successors(
    ifname: &str,
    addresses: &[IpAddr],
    known: BTreeSet<u32>,
) -> Result<BTreeSet<u32>, DiscoverError> {
    // The namespace is only named in errors; it is not read.
    let node = Netns::Pid(std::process::id());
    let (ifname, addresses) = (ifname.to_owned(), addresses.to_vec());
    on_thread(&node.clone(), async move |handle| {
        let failed = |error: io::Error| DiscoverError::netlink(&node, error);
        let mut found = BTreeSet::new();
        let mut others = Vec::new();
        let mut dumped = pin!(handle.link().get().execute());
        while let Some(link) = dumped.next().await {
            let link = link.map_err(|error| failed(links::failed(&error)))?;
            let index = link.header.index;
            if known.contains(&index) || !behind::leads_elsewhere(&link) {
                continue;
            }
            if name_of(&link).as_deref() == Some(&ifname) {
                found.insert(index);
            } else {
                others.push((index, behind::namespace_behind(&link)));
            }
        }
        for (index, behind) in others {
            let Some(number) = behind else {
                continue;
            };
            let there = addresses_behind(number).await.map_err(failed)?;
            if there.iter().any(|address| addresses.contains(address)) {
                found.insert(index);
            }
        }
        Ok(found)
    })
}

/// Every address in the namespace that has this number here.
async fn addresses_behind(number: i32) -> io::Result<Vec<IpAddr>> {
    let (connection, handle, _) = rtnetlink::new_connection_with_strict_check()?;
    let found = tokio::select! {
        () = connection => Err(io::ErrorKind::UnexpectedEof.into()),
        found = inside::addresses(&handle, number, |_| true) => found,
    };
    match found {
        // The namespace is gone.
        Err(error) if error.raw_os_error().is_some() => Ok(Vec::new()),
        found => found,
    }
}
