//! Which endpoint has an address, whatever addresses pods give their interfaces; and what happens
//! to an endpoint that is refused.

use super::scenario::{Node, spec};
use crate::{
    core::Event, datapath::plan::Step, endpoint::spec::EndpointSpec, source_event::SourceEvent,
};

fn with_addresses(key: &str, host: u8, addresses: &[&str]) -> EndpointSpec {
    EndpointSpec {
        addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
        ..spec(key, host, "app=web")
    }
}

fn addresses(node: &Node, key: &str) -> Vec<String> {
    let views = node.core.snapshot().endpoints;
    let view = views.into_iter().find(|view| view.key == key).unwrap();
    view.ipv4.into_iter().chain(view.ipv6).collect()
}

fn problem(node: &Node) -> String {
    node.core.summary().endpoint_problems.join("\n")
}

#[test]
fn an_address_of_another_endpoint_or_of_the_node_never_counts() {
    let mut node = Node::usual();
    node.event(Event::NodeAddresses(vec!["10.0.0.1".parse().unwrap()]));
    node.endpoint(spec("other", 8, "app=other"));
    let before = node.datapath.lxc.clone();
    for claimed in ["10.0.0.8", "10.0.0.1"] {
        // The claimed address comes before the pod's own.
        node.endpoint(with_addresses("web", 7, &[claimed, "10.0.0.7"]));
        assert_eq!(addresses(&node, "web"), ["10.0.0.7"]);
        assert_eq!(node.datapath.lxc, before);
        assert_eq!(problem(&node), "");
        // The claimed address replaces the pod's own address. The policy in force stays, and status gives the reason.
        node.endpoint(with_addresses("web", 7, &[claimed]));
        assert_eq!(addresses(&node, "web"), ["10.0.0.7"]);
        assert_eq!(node.datapath.lxc, before);
        assert!(problem(&node).contains(claimed), "{}", problem(&node));
    }
    node.endpoint(spec("web", 7, "app=web"));
    assert_eq!(problem(&node), "");
}

#[test]
fn a_later_correct_version_of_an_endpoint_clears_the_fault_of_the_one_before() {
    let mut node = Node::usual();
    let wrong = EndpointSpec {
        labels: vec!["k8s:".to_owned()],
        ..spec("other", 8, "app=other")
    };
    node.endpoint(wrong);
    assert!(problem(&node).contains("`k8s:` is not a label"));
    node.endpoint(spec("other", 8, "app=other"));
    assert_eq!(problem(&node), "");
    // The wrong version does not come back either when an endpoint is removed.
    node.event(Event::Endpoints(SourceEvent::Delete("web".to_owned())));
    assert_eq!(problem(&node), "");
    assert_eq!(addresses(&node, "other"), ["10.0.0.8"]);
}

/// Documents of a file that change places have each other's keys afterwards.
#[test]
fn endpoints_whose_keys_change_places_stay_the_same_endpoints() {
    let mut node = Node::usual();
    node.endpoint(spec("other", 8, "app=other"));
    let before = node.datapath.clone();
    let steps = node.endpoint(spec("other", 7, "app=web"));
    assert_eq!(addresses(&node, "other"), ["10.0.0.7"]);
    let more = node.endpoint(spec("web", 8, "app=other"));
    assert_eq!(addresses(&node, "web"), ["10.0.0.8"]);
    let detached = |step: &Step| matches!(step, Step::Detach(_));
    assert!(!steps.iter().chain(&more).any(detached));
    assert_eq!(node.datapath.lxc, before.lxc);
    assert_eq!(node.datapath.policy, before.policy);
    for (id, text) in &node.datapath.files {
        assert_ne!(Some(text), before.files.get(id), "the file has the old key");
    }
    // The other document is gone, and its endpoint with it.
    node.endpoint(spec("web", 7, "app=web"));
    node.event(Event::Endpoints(SourceEvent::Delete("other".to_owned())));
    assert_eq!(addresses(&node, "web"), ["10.0.0.7"]);
    assert_eq!(node.datapath.lxc.len(), 1);
}

#[test]
fn endpoints_get_their_addresses_once_those_that_had_them_moved_to_others() {
    let mut node = Node::usual();
    node.endpoint(spec("web", 7, "app=web"));
    node.endpoint(spec("next", 8, "app=web"));
    // `last` waits for the address of `next`, which waits for the address of `web`.
    node.endpoint(with_addresses("next", 18, &["10.0.0.7"]));
    node.endpoint(with_addresses("last", 19, &["10.0.0.7", "fd00::9"]));
    assert!(problem(&node).contains("10.0.0.7"), "{}", problem(&node));
    node.endpoint(with_addresses("web", 7, &["10.0.0.9"]));
    let taken: Vec<_> = ["next", "last"]
        .into_iter()
        .filter(|key| {
            let views = node.core.snapshot().endpoints;
            let mut of_key = views.into_iter().filter(|view| view.key == *key);
            of_key.any(|view| view.ipv4.as_deref() == Some("10.0.0.7"))
        })
        .collect();
    assert_eq!(taken.len(), 1, "{}", problem(&node));
}

#[test]
fn an_endpoint_gets_its_address_once_the_one_that_had_it_is_gone() {
    let mut node = Node::usual();
    let both = ["10.0.0.7", "fd00::8"];
    for wanted in [&both[..1], &both] {
        node.endpoint(spec("web", 7, "app=web"));
        node.endpoint(with_addresses("next", 8, wanted));
        assert_eq!(addresses(&node, "web"), ["10.0.0.7"]);
        assert!(problem(&node).contains("10.0.0.7"), "{}", problem(&node));
        node.event(Event::Endpoints(SourceEvent::Delete("web".to_owned())));
        assert_eq!(problem(&node), "");
        assert_eq!(addresses(&node, "next"), wanted);
        assert_eq!(node.datapath.lxc.len(), wanted.len());
        node.event(Event::Endpoints(SourceEvent::Delete("next".to_owned())));
    }
}

#[test]
fn an_endpoint_gets_its_address_once_the_node_gives_it_up() {
    let mut node = Node::new();
    node.begin();
    node.sync();
    node.event(Event::NodeAddresses(vec!["10.0.0.7".parse().unwrap()]));
    node.endpoint(spec("web", 7, "app=web"));
    assert!(problem(&node).contains("this node's"), "{}", problem(&node));
    node.event(Event::NodeAddresses(vec!["10.0.0.1".parse().unwrap()]));
    assert_eq!(problem(&node), "");
    assert_eq!(addresses(&node, "web"), ["10.0.0.7"]);
}
