//! The node's own addresses and interfaces, sent to the core whenever they change.
//!
//! If the node gets an address that a name also has, that address is open until the core knows the change: the
//! kernel's events say when to look. The agent looks every few seconds as well.

use std::{
    io,
    time::{Duration, Instant},
};

use agent_cluster::own_interfaces::{self, OwnInterfaces};
use agent_core::core::event::Event;
use rtnetlink::{
    MulticastGroup,
    packet_core::{NetlinkMessage, NetlinkPayload},
    packet_route::{
        RouteNetlinkMessage,
        link::{LinkAttribute, LinkMessage},
    },
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    netlink_events::{NetlinkEvents, Subscription},
    runner::CoreHandle,
};

/// Without an event, the node's addresses are listed this often.
const INTERVAL: Duration = Duration::from_secs(5);
/// The shortest pause after a look, and the longest one; a pause is nine times as long as the look
/// took, so that looking takes a tenth of the time at most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));
const LOOKS: u32 = 9;

const SUBSCRIPTION: Subscription = Subscription {
    groups: &[
        MulticastGroup::Ipv4Ifaddr,
        MulticastGroup::Ipv6Ifaddr,
        MulticastGroup::Link,
    ],
    filter: || Box::new(|message| is_change(&message)),
    instead: "the agent lists the node's addresses every five seconds",
};

/// Subscribes to the kernel's events.
pub(crate) fn events(tasks: &TaskTracker, stop: CancellationToken) -> NetlinkEvents {
    NetlinkEvents::watch(SUBSCRIPTION, tasks, stop)
}

/// Sends the core the node's addresses and interfaces whenever they differ from `current`.
pub(crate) async fn run(core: CoreHandle, mut current: OwnInterfaces, events: NetlinkEvents) {
    loop {
        tokio::select! {
            () = events.changed() => {}
            () = tokio::time::sleep(INTERVAL) => {}
        }
        let begin = Instant::now();
        match look(&current, own_interfaces::list) {
            Ok(now) => {
                for event in changes(&current, &now) {
                    if core.send(event).await.is_err() {
                        return;
                    }
                }
                current = now;
            }
            Err(error) => {
                tracing::warn!(%error, "cannot list the node's addresses; those of the last look stay");
            }
        }
        let (shortest, longest) = PAUSES;
        let pause = (begin.elapsed() * LOOKS).clamp(shortest, longest);
        tokio::time::sleep(pause).await;
    }
}

/// The node's interfaces now. If a list lacks something, it counts only if a second list lacks the same: the kernel
/// may change its tables while it lists them.
fn look(
    current: &OwnInterfaces,
    mut list: impl FnMut() -> io::Result<OwnInterfaces>,
) -> io::Result<OwnInterfaces> {
    let now = list()?;
    let lost = current.addresses.difference(&now.addresses).count() > 0;
    let lost_ipvs = current.of_services.has_ipvs && !now.of_services.has_ipvs;
    match lost || lost_ipvs {
        true => list(),
        false => Ok(now),
    }
}

/// Events for the differences between `before` and `now`.
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

/// Whether a message is about an address, or about an interface of Services. A pod changes the state of its own
/// interface as often as it likes, and the node's end changes with it.
fn is_change(message: &NetlinkMessage<RouteNetlinkMessage>) -> bool {
    let is_of_services = |link: &LinkMessage| {
        let mut attributes = link.attributes.iter();
        attributes.any(|attribute| match attribute {
            LinkAttribute::IfName(name) => own_interfaces::is_of_services(name),
            _ => false,
        })
    };
    match &message.payload {
        NetlinkPayload::InnerMessage(
            RouteNetlinkMessage::NewAddress(_) | RouteNetlinkMessage::DelAddress(_),
        )
        | NetlinkPayload::Overrun(_) => true,
        NetlinkPayload::InnerMessage(
            RouteNetlinkMessage::NewLink(link) | RouteNetlinkMessage::DelLink(link),
        ) => is_of_services(link),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use rtnetlink::{packet_core::NetlinkHeader, packet_route::address::AddressMessage};

    use super::*;

    fn own(addresses: &[&str]) -> OwnInterfaces {
        OwnInterfaces {
            addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
            ..OwnInterfaces::default()
        }
    }

    #[test]
    fn an_address_is_gone_only_if_two_lists_lack_it() {
        let current = own(&["192.0.2.1", "192.0.2.2"]);
        let looked = |mut lists: Vec<io::Result<OwnInterfaces>>| {
            look(&current, || lists.pop().expect("no third list")).ok()
        };
        let (whole, cut) = (current.clone(), own(&["192.0.2.1"]));
        let failed = || Err(io::Error::other("no descriptor"));
        assert_eq!(looked(vec![Ok(whole.clone())]), Some(whole.clone()));
        // The closure takes the last list first.
        assert_eq!(
            looked(vec![Ok(whole.clone()), Ok(cut.clone())]),
            Some(whole)
        );
        assert_eq!(
            looked(vec![Ok(cut.clone()), Ok(cut.clone())]),
            Some(cut.clone())
        );
        assert_eq!(looked(vec![failed(), Ok(cut)]), None);
        assert_eq!(looked(vec![failed()]), None);
    }

    #[test]
    fn addresses_and_interfaces_of_services_are_changes_and_other_interfaces_are_none() {
        let of = |inner| {
            let payload = NetlinkPayload::InnerMessage(inner);
            is_change(&NetlinkMessage::new(NetlinkHeader::default(), payload))
        };
        let link = |name: &str| {
            let mut link = LinkMessage::default();
            link.attributes.push(LinkAttribute::IfName(name.to_owned()));
            RouteNetlinkMessage::NewLink(link)
        };
        assert!(of(RouteNetlinkMessage::NewAddress(
            AddressMessage::default()
        )));
        assert!(of(link("nodelocaldns")) && of(link("kube-ipvs0")));
        assert!(!of(link("lxc7")));
    }
}
