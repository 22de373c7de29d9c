//! The node's own addresses.

use std::{
    collections::BTreeSet,
    io,
    net::{IpAddr, SocketAddrV4, SocketAddrV6},
    time::Duration,
};

use tokio_util::sync::CancellationToken;

use crate::{core::event::Event, runner::CoreHandle};

/// Addresses of a node change rarely; a late one is labelled at most this much later.
const INTERVAL: Duration = Duration::from_secs(5);

/// Tells the core the node's addresses whenever they differ from `told`.
pub(crate) async fn run(core: CoreHandle, mut current: BTreeSet<IpAddr>, stop: CancellationToken) {
    let mut ticker = tokio::time::interval(INTERVAL);
    loop {
        tokio::select! {
            _ = ticker.tick() => {}
            () = stop.cancelled() => return,
        }
        match addresses() {
            Ok(now) if now == current => {}
            Ok(now) => {
                if core
                    .send(Event::NodeAddresses(now.iter().copied().collect()))
                    .await
                    .is_err()
                {
                    return;
                }
                current = now;
            }
            Err(error) => tracing::warn!(%error, "cannot list the node's addresses"),
        }
    }
}

/// Addresses of the interfaces of this network namespace, loopback included.
pub(crate) fn addresses() -> io::Result<BTreeSet<IpAddr>> {
    let found = nix::ifaddrs::getifaddrs()?;
    Ok(found
        .filter_map(|interface| interface.address)
        .filter_map(|address| {
            let v4 = address
                .as_sockaddr_in()
                .map(|a| IpAddr::V4(*SocketAddrV4::from(*a).ip()));
            v4.or_else(|| {
                address
                    .as_sockaddr_in6()
                    .map(|a| IpAddr::V6(*SocketAddrV6::from(*a).ip()))
            })
        })
        .collect())
}
