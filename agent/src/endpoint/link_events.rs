//! Changes of the node's interfaces and routes, as the kernel reports them (RTNLGRP_LINK and the
//! groups of routes).

use std::collections::HashMap;

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
    endpoint::discover::ports::filters_vlans,
    netlink_events::{NetlinkEvents, Subscription},
};

const SUBSCRIPTION: Subscription = Subscription {
    groups: &[
        MulticastGroup::Link,
        MulticastGroup::Ipv4Route,
        MulticastGroup::Ipv6Route,
    ],
    filter: || {
        let mut known = HashMap::new();
        Box::new(move |message| changes(&mut known, message))
    },
    instead: "the agent polls for new pods",
};

/// Wakes a task when interfaces or routes changed.
#[derive(Clone, Debug, Default)]
pub(crate) struct LinkEvents(NetlinkEvents);

/// The properties of an interface that decide where a pod is.
#[derive(Debug, Default, PartialEq, Eq)]
struct Shape {
    name: Option<String>,
    master: Option<u32>,
    peer: Option<u32>,
    namespace: Option<i32>,
    filters_vlans: bool,
}

impl Shape {
    fn of(link: &LinkMessage) -> Self {
        let mut shape = Self {
            filters_vlans: filters_vlans(link),
            ..Self::default()
        };
        for attribute in &link.attributes {
            match attribute {
                LinkAttribute::IfName(name) => shape.name = Some(name.clone()),
                LinkAttribute::Controller(master) => shape.master = Some(*master),
                LinkAttribute::Link(peer) => shape.peer = Some(*peer),
                LinkAttribute::LinkNetNsId(namespace) => shape.namespace = Some(*namespace),
                _ => {}
            }
        }
        shape
    }
}

impl LinkEvents {
    /// Subscribes until stopped. While the subscription fails, no event comes.
    pub(crate) fn watch(tasks: &TaskTracker, stop: CancellationToken) -> Self {
        Self(NetlinkEvents::watch(SUBSCRIPTION, tasks, stop))
    }

    /// Returns when something changed since the last call.
    pub(crate) async fn changed(&self) {
        self.0.changed().await;
    }
}

/// Whether a message is about more than the state of an interface. A pod changes the state of its own interface as
/// often as it likes, and the node's end changes with it.
fn changes(known: &mut HashMap<u32, Shape>, message: NetlinkMessage<RouteNetlinkMessage>) -> bool {
    match message.payload {
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewLink(link)) => {
            let shape = Shape::of(&link);
            let before = known.get(&link.header.index);
            let changed = before != Some(&shape);
            known.insert(link.header.index, shape);
            changed
        }
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::DelLink(link)) => {
            // A port that leaves its bridge is reported like this too, although the interface stays.
            known.remove(&link.header.index);
            true
        }
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewRoute(_))
        | NetlinkPayload::Overrun(_) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use rtnetlink::packet_core::NetlinkHeader;

    use super::*;

    fn message(
        inner: fn(LinkMessage) -> RouteNetlinkMessage,
        name: &str,
    ) -> NetlinkMessage<RouteNetlinkMessage> {
        let mut link = LinkMessage::default();
        link.header.index = 7;
        link.attributes.push(LinkAttribute::IfName(name.to_owned()));
        let payload = NetlinkPayload::InnerMessage(inner(link));
        NetlinkMessage::new(NetlinkHeader::default(), payload)
    }

    #[test]
    fn a_pod_that_sets_its_interface_up_and_down_causes_one_event() {
        use RouteNetlinkMessage::{DelLink, NewLink};
        let mut known = HashMap::new();
        assert!(changes(&mut known, message(NewLink, "lxc7")));
        assert!(!changes(&mut known, message(NewLink, "lxc7")));
        assert!(changes(&mut known, message(NewLink, "lxc8")));
        assert!(changes(&mut known, message(DelLink, "lxc8")));
        assert!(changes(&mut known, message(NewLink, "lxc8")));
        assert_eq!(known.len(), 1);
    }
}
