//! The node's own addresses and interfaces, sent to the core whenever they change.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::{
    core::event::Event,
    own_interfaces::{self, OwnInterfaces},
    runner::CoreHandle,
};

/// Addresses of a node change rarely; a late one is labelled at most this much later.
const INTERVAL: Duration = Duration::from_secs(5);

/// Sends the core the node's addresses and interfaces whenever they differ from `current`.
pub(crate) async fn run(core: CoreHandle, mut current: OwnInterfaces, stop: CancellationToken) {
    let mut ticker = tokio::time::interval(INTERVAL);
    loop {
        tokio::select! {
            _ = ticker.tick() => {}
            () = stop.cancelled() => return,
        }
        match own_interfaces::list() {
            Ok(now) => {
                for event in changes(&current, &now) {
                    if core.send(event).await.is_err() {
                        return;
                    }
                }
                current = now;
            }
            Err(error) => tracing::warn!(%error, "cannot list the node's addresses"),
        }
    }
}

/// What is new in `now`.
pub(crate) fn changes(before: &OwnInterfaces, now: &OwnInterfaces) -> Vec<Event> {
    let mut events = Vec::new();
    if before.addresses != now.addresses {
        events.push(Event::NodeAddresses(
            now.addresses.iter().copied().collect(),
        ));
    }
    if before.of_services != now.of_services {
        events.push(Event::NodeInterfaces(now.of_services.clone()));
    }
    events
}
