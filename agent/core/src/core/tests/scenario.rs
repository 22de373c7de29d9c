//! From a policy and an answer to the ipcache.

use std::net::IpAddr;

use dns_policy::{
    boot_time::BootTime,
    mapping::{Mapping, Realised, Refusal},
};
use shared_maps::{
    IdentityId,
    policy::{EGRESS, PolicyKey},
};

pub(super) use crate::core::testing::node::{Node, WEB, mapping, spec};
use crate::{
    core::{CoreConfig, Effect, Event},
    datapath::plan::Step,
    endpoint::config_file,
};

#[test]
fn an_answer_opens_its_address_with_one_write() {
    let mut node = Node::new();
    node.begin();
    assert!(node.policy(WEB).is_empty());
    assert!(node.endpoint(spec("web", 7, "app=web")).is_empty());
    let steps = node.sync();
    let at = |wanted: fn(&Step) -> bool| steps.iter().position(wanted).unwrap();
    let order = [
        at(|s| matches!(s, Step::Checkpoint(_))),
        at(|s| matches!(s, Step::WriteEndpoint(..))),
        at(|s| matches!(s, Step::CreatePolicyMap(_))),
        at(|s| matches!(s, Step::SetPolicy(..))),
        at(|s| matches!(s, Step::SetLxc(..))),
        at(|s| matches!(s, Step::SetIpcache(..))),
        at(|s| matches!(s, Step::Attach(_))),
    ];
    assert!(order.is_sorted(), "{order:?}");
    // The resolver learns that no document is left to be read.
    node.effects
        .retain(|effect| !matches!(effect, Effect::Resolver { .. }));
    assert!(
        matches!(node.effects.as_slice(), [Effect::Rules(rules), Effect::SnapshotReady]
        if rules.changed.len() == 1 && rules.changed[0].rules.ports.len() == 2)
    );
    let (steps, result) = node.learn("www.cilium.io", &["1.1.1.1"]);
    assert_eq!(steps.len(), 1, "{steps:?}");
    assert_eq!(result.realised, Realised::Yes);
    assert_eq!(result.lease_end, Some(node.now.plus_secs(120)));
    let identity = node.identity("1.1.1.1").unwrap();
    let key = PolicyKey::new(identity.0, EGRESS, 6, 443, 16);
    assert!(node.datapath.policy[&node.id()].contains_key(&key));
    let (steps, _) = node.learn("sub.cilium.io", &["2.2.2.2"]);
    assert!(
        matches!(steps.as_slice(), [Step::SetIpcache(..)]),
        "{steps:?}"
    );
    let (steps, result) = node.learn("other.example.com", &["3.3.3.3"]);
    assert!(steps.is_empty(), "{steps:?}");
    assert_eq!(result.realised, Realised::Yes);
}

#[test]
fn what_was_learned_becomes_durable() {
    let mut node = Node::usual();
    node.learn("www.cilium.io", &["1.1.1.1"]);
    let due = node.core.next_deadline().unwrap();
    assert!(due < node.now.plus_secs(6));
    let steps = node.tick(due);
    assert!(
        matches!(steps.as_slice(), [Step::WriteEndpoint(_, text)] if text.contains("www.cilium.io."))
    );
    assert!(matches!(node.effects.as_slice(), [Effect::Result(result)] if result.durable));
}

#[test]
fn what_an_endpoint_learns_under_new_labels_becomes_durable() {
    let mut node = Node::usual();
    let mut relabelled = spec("web", 7, "app=web");
    relabelled.labels.push("k8s:tier=front".to_owned());
    node.endpoint(relabelled);
    node.learn("www.cilium.io", &["1.1.1.1"]);
    node.tick(node.now.plus_secs(6));
    assert!(node.datapath.files[&node.id()].contains("www.cilium.io."));
}

#[test]
fn a_file_has_the_addresses_of_an_answer_together() {
    let mut node = Node::usual();
    let history = |node: &Node| {
        let text = &node.datapath.files[&node.id()];
        let history = config_file::parse(text).unwrap().history;
        let addresses = history.iter().map(|entry| entry.addresses.len());
        addresses.collect::<Vec<_>>()
    };
    node.learn("www.cilium.io", &["1.1.1.1", "1.1.1.2", "1.1.1.3"]);
    node.tick(node.now.plus_secs(6));
    assert_eq!(history(&node), [3]);
    node.learn("www.cilium.io", &["1.1.1.1"]);
    node.tick(node.now.plus_secs(12));
    assert_eq!(history(&node), [1, 2]);
}

#[test]
fn a_file_has_the_revision_of_its_rules() {
    for part in [1, usize::MAX] {
        let mut node = Node::usual();
        node.in_parts(part);
        node.policy(&WEB.replace(r#"matchPattern: "*"}"#, "matchName: www.cilium.io}"));
        let text = &node.datapath.files[&node.id()];
        assert!(text.contains("www.cilium.io"), "{text}");
        let rules = config_file::parse(text).unwrap().rules.unwrap();
        let published = node.core.summary().published_revision;
        assert_eq!(rules.revision, published, "parts of {part}");
    }
}

#[test]
fn a_pair_goes_once_lease_and_use_are_over() {
    let mut node = Node::usual_with(CoreConfig {
        max_deferred_deletes: 0,
        ..CoreConfig::default()
    });
    let learned = node.now;
    node.learn("www.cilium.io", &["1.1.1.1"]);
    node.tick(learned.plus_secs(124));
    assert!(node.identity("1.1.1.1").is_some());
    node.tick(learned.plus_secs(125));
    assert!(node.identity("1.1.1.1").is_none());
}

#[test]
fn believes_only_what_policy_allows_and_what_is_not_of_this_node() {
    let mut node = Node::usual();
    node.event(Event::NodeAddresses(vec!["10.0.0.1".parse().unwrap()]));
    assert_eq!(node.identity("10.0.0.1"), Some(IdentityId::HOST));
    let refused = |node: &mut Node, change: &dyn Fn(&mut Mapping)| {
        let mut mapping = mapping(node, "www.cilium.io", &["1.1.1.1"]);
        change(&mut mapping);
        let (steps, result) = node.mapping(mapping);
        assert!(steps.is_empty(), "{steps:?}");
        result.realised
    };
    let unknown = Realised::No(Refusal::EndpointUnknown);
    assert_eq!(refused(&mut node, &|m| m.endpoint.ifindex = 1), unknown);
    assert_eq!(
        refused(&mut node, &|m| m.endpoint.client =
            "10.0.0.8".parse().unwrap()),
        unknown
    );
    assert_eq!(
        refused(&mut node, &|m| m.seen_at = BootTime::from_nanos(1)),
        unknown
    );
    let denied = Realised::No(Refusal::NotAllowed);
    assert_eq!(
        refused(&mut node, &|m| m.server = "10.9.0.54:53".parse().unwrap()),
        denied
    );
    assert_eq!(
        refused(&mut node, &|m| m.server = "10.9.0.53:5353".parse().unwrap()),
        denied
    );
    let invalid = Realised::No(Refusal::Invalid);
    assert_eq!(refused(&mut node, &|m| m.addresses.clear()), invalid);
    assert_eq!(refused(&mut node, &|m| m.rcode = 3), invalid);
    for address in [
        "10.0.0.1",
        "10.0.0.7",
        "127.0.0.1",
        "224.0.0.1",
        "0.0.0.0",
        "::ffff:1.2.3.4",
        "::1",
    ] {
        let result = refused(&mut node, &|m| m.addresses = vec![address.parse().unwrap()]);
        assert_eq!(result, Realised::Yes, "{address}");
    }
    assert_eq!(node.identity("10.0.0.1"), Some(IdentityId::HOST));
}

#[test]
fn one_stream_cannot_flood() {
    let mut node = Node::usual_with(CoreConfig {
        mapping_rate: 1,
        ..CoreConfig::default()
    });
    let results: Vec<_> = (0..11)
        .map(|_| node.learn("www.cilium.io", &["1.1.1.1"]).1.realised)
        .collect();
    assert_eq!(results[9], Realised::Yes);
    assert_eq!(results[10], Realised::No(Refusal::RateLimited));
}

#[test]
fn the_directory_says_what_the_snapshot_says() {
    let mut node = Node::usual();
    node.learn("www.cilium.io", &["1.1.1.1"]);
    let (directory, snapshot) = (node.core.directory(), node.core.snapshot());
    let identities: Vec<u32> = snapshot.identities.iter().map(|view| view.id).collect();
    let found: Vec<u32> = directory.identities.iter().map(|id| id.0).collect();
    assert_eq!(found, identities);
    let prefixes = snapshot.ipcache.iter();
    let prefixes: Vec<_> = prefixes
        .map(|view| (view.prefix.clone(), view.realised.unwrap_or(view.identity)))
        .collect();
    let found = directory.prefixes.iter();
    let found: Vec<_> = found
        .map(|(prefix, id)| (prefix.to_string(), id.0))
        .collect();
    assert_eq!(found, prefixes);
    let [location] = directory.locations.as_slice() else {
        panic!("{directory:?}");
    };
    assert_eq!(location.id.0, snapshot.endpoints[0].id);
    assert_eq!(location.identity.0, snapshot.endpoints[0].identity);
    assert_eq!(location.ifindex, 107);
    assert_eq!(location.addresses, ["10.0.0.7".parse::<IpAddr>().unwrap()]);
}
