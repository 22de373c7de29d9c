//! Leases end within the hour, and with the process that holds them.

use dns_policy::mapping::Mapping;

use super::scenario::{Node, mapping};
use crate::core::{
    CoreConfig, Event,
    event::{CleanNames, StreamId},
};

const DAY: u32 = 86_400;
const ADDRESS: &str = "1.1.1.1";
const HOLDER: StreamId = StreamId(1);
const OTHER: StreamId = StreamId(2);

/// A node with one address that lasts a day and is under a lease of `HOLDER`.
fn leased() -> Node {
    let mut node = Node::usual_with(CoreConfig {
        max_deferred_deletes: 0,
        ..CoreConfig::default()
    });
    let long = Mapping {
        ttl: DAY,
        ..mapping(&node, "www.cilium.io", &[ADDRESS])
    };
    let (_, result) = node.mapping(long);
    assert_eq!(result.lease_end, Some(node.now.plus_secs(3600)));
    node
}

fn clean(node: &mut Node) {
    let all = CleanNames::default();
    node.event(Event::CleanNames(all));
}

fn is_open(node: &Node) -> bool {
    node.identity(ADDRESS).is_some()
}

#[test]
fn a_cleaned_name_closes_although_the_proxy_with_its_lease_died() {
    // The end of the process, the end of its stream and the cleaning may come in almost any order.
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [2, 0, 1], [1, 2, 0]] {
        let mut node = leased();
        for step in order {
            match step {
                0 => drop(node.event(Event::StreamDown(HOLDER))),
                1 => drop(node.event(Event::HolderEnded(vec![HOLDER]))),
                _ => clean(&mut node),
            }
        }
        assert!(!is_open(&node), "{order:?}");
        assert!(node.core.unrevoked(None).is_empty(), "{order:?}");
    }
}

#[test]
fn a_closed_stream_of_a_process_that_lives_keeps_its_leases() {
    let mut node = leased();
    let end = node.now.plus_secs(3605);
    node.event(Event::StreamDown(HOLDER));
    clean(&mut node);
    assert!(is_open(&node));
    let left = node.core.unrevoked(Some("*.cilium.io"));
    assert_eq!(left.len(), 1);
    assert_eq!(
        (left[0].until, left[0].address.to_string()),
        (end, ADDRESS.to_owned())
    );
    assert!(left[0].streams.contains(&HOLDER));
    assert!(node.core.unrevoked(Some("*.example.com")).is_empty());
    // The name closes when the lease ends at the latest, not when the TTL ends.
    node.tick(end);
    assert!(!is_open(&node));
}

/// A process may pass its connection on before it ends. The next owner of the connection then continues to answer.
#[test]
fn a_stream_that_outlives_its_process_keeps_its_leases() {
    let mut node = leased();
    node.event(Event::HolderEnded(vec![HOLDER]));
    node.now = node.now.plus_secs(10);
    node.event(Event::StreamDown(HOLDER));
    clean(&mut node);
    assert!(is_open(&node));
}

#[test]
fn another_proxy_gives_its_leases_back_by_itself() {
    let mut node = leased();
    node.event(Event::StreamUp(OTHER));
    node.event(Event::StreamDown(HOLDER));
    node.event(Event::HolderEnded(vec![HOLDER]));
    clean(&mut node);
    assert!(is_open(&node), "the other one may answer under it");
    node.event(Event::RevokeAcked(vec![crate::core::event::RevokeAck {
        stream: OTHER,
        id: 1,
    }]));
    assert!(!is_open(&node));
}

#[test]
fn the_end_of_a_process_closes_nothing_by_itself() {
    let mut node = leased();
    let learned = node.now;
    node.event(Event::StreamDown(HOLDER));
    node.event(Event::HolderEnded(vec![HOLDER]));
    for hours in [2, 23] {
        node.tick(learned.plus_secs(hours * 3600));
        assert!(is_open(&node), "{hours} h: its TTL runs");
    }
    node.tick(learned.plus_secs(u64::from(DAY)));
    assert!(!is_open(&node));
}
