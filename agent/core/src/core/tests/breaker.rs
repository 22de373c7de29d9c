//! The circuit breaker on identities of names: what is open stays open.

use dns_policy::mapping::{Realised, Refusal};
use shared_maps::policy::{EGRESS, PolicyKey};

use super::{
    restart::again,
    scenario::{Node, spec},
};
use crate::core::{CoreConfig, Event, event::CleanNames};

const NOT_REALISED: Realised = Realised::No(Refusal::NotRealised);

fn policy(rules: &str) -> String {
    format!(
        r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {{name: p}}
spec:
  endpointSelector: {{}}
  egress:
  - toCIDR: [10.9.0.53/32]
    toPorts: [{{ports: [{{port: 53}}], rules: {{dns: [{{matchPattern: '*'}}]}}}}]
  - toFQDNs: [{{matchName: a.test}}]
    toPorts: [{{ports: [{{port: '1', protocol: TCP}}]}}]
  - toFQDNs: [{{matchName: b.test}}]
    toPorts: [{{ports: [{{port: '2', protocol: TCP}}]}}]
  - toFQDNs: [{{matchName: c.test}}]
    toPorts: [{{ports: [{{port: '3', protocol: TCP}}]}}]
{rules}"
    )
}

fn config(max: usize) -> CoreConfig {
    CoreConfig {
        max_fqdn_identities: Some(max),
        max_deferred_deletes: 0,
        enable_ipv6: false,
        restore_grace: std::time::Duration::from_secs(10),
        ..CoreConfig::default()
    }
}

/// A node with three names in policy; `max` combinations of names may have an identity.
fn node(max: usize) -> Node {
    Node::synced(config(max), &policy(""))
}

fn learn(node: &mut Node, name: &str, address: &str) -> Realised {
    let (_, result) = node.learn(name, &[address]);
    assert!(result.realised == Realised::Yes || result.lease_end.is_none());
    result.realised
}

/// Ports of the three names that are open at an address.
fn open(node: &Node, address: &str) -> Vec<u16> {
    let Some(identity) = node.identity(address) else {
        return Vec::new();
    };
    let map = &node.datapath.policy[&node.id()];
    let is_open = |port: &u16| map.contains_key(&PolicyKey::new(identity.0, EGRESS, 6, *port, 16));
    [1, 2, 3].into_iter().filter(is_open).collect()
}

fn limited(node: &Node) -> usize {
    node.core.summary().addresses_limited
}

fn clean(node: &mut Node, name: &str) {
    let before = node.core.summary().counters.revocations;
    node.event(Event::CleanNames(CleanNames {
        pattern: Some(name.to_owned()),
        endpoint: None,
    }));
    for id in before..node.core.summary().counters.revocations {
        let stream = crate::core::event::StreamId(1);
        node.event(Event::RevokeAcked(vec![crate::core::event::RevokeAck {
            stream,
            id: id + 1,
        }]));
    }
}

/// There are more selectors than allowed combinations, because the identity of a single selector does not count.
#[test]
fn selectors_alone_do_not_use_the_limit_up() {
    let names: String = (0..8300)
        .map(|n| format!("  - toFQDNs: [{{matchName: n{n}.test}}]\n    toPorts: [{{ports: [{{port: '9', protocol: TCP}}]}}]\n"))
        .collect();
    let max = CoreConfig::default().max_fqdn_identities.unwrap();
    let mut node = Node::synced(config(max), &policy(&names));
    assert!(node.core.summary().fqdn_identities > 8192);
    for name in ["a.test", "b.test", "n1.test"] {
        assert_eq!(learn(&mut node, name, "1.1.1.1"), Realised::Yes);
    }
    assert_eq!((open(&node, "1.1.1.1"), limited(&node)), (vec![1, 2], 0));
    assert_eq!(node.core.summary().fqdn_combinations, 1);
}

#[test]
fn one_name_is_never_limited() {
    let mut node = node(0);
    assert_eq!(learn(&mut node, "a.test", "1.1.1.1"), Realised::Yes);
    assert_eq!(open(&node, "1.1.1.1"), [1]);
    assert_eq!(limited(&node), 0);
}

#[test]
fn an_address_keeps_what_it_has_and_gets_no_more() {
    let mut node = node(0);
    learn(&mut node, "b.test", "1.1.1.1");
    assert_eq!(learn(&mut node, "a.test", "1.1.1.1"), NOT_REALISED);
    assert_eq!(open(&node, "1.1.1.1"), [2]);
    assert_eq!(limited(&node), 1);
    // The same answer again limits no other address.
    learn(&mut node, "a.test", "1.1.1.1");
    let summary = node.core.summary();
    assert_eq!(summary.counters.identities_limited, 1);
    assert_eq!(summary.fqdn_identities, 3);
    // Other addresses get their identities as before.
    assert_eq!(learn(&mut node, "a.test", "1.1.1.2"), Realised::Yes);
}

#[test]
fn a_combination_that_has_an_identity_is_no_new_one() {
    let mut node = node(1);
    for (name, address) in [("a.test", "1.1.1.1"), ("b.test", "1.1.1.1")] {
        assert_eq!(learn(&mut node, name, address), Realised::Yes);
    }
    // The limit is reached: known combinations still work, and others get the nearest one.
    for (name, address) in [("a.test", "1.1.1.2"), ("b.test", "1.1.1.2")] {
        assert_eq!(learn(&mut node, name, address), Realised::Yes);
    }
    assert_eq!(node.identity("1.1.1.1"), node.identity("1.1.1.2"));
    assert_eq!(learn(&mut node, "c.test", "1.1.1.2"), NOT_REALISED);
    assert_eq!(open(&node, "1.1.1.2"), [1, 2]);
    learn(&mut node, "c.test", "1.1.1.3");
    assert_eq!(learn(&mut node, "a.test", "1.1.1.3"), NOT_REALISED);
    // The combination {a, b} would take the label of c from the address.
    assert_eq!(learn(&mut node, "b.test", "1.1.1.3"), NOT_REALISED);
    assert_eq!(open(&node, "1.1.1.3"), [3]);
}

#[test]
fn a_name_that_goes_closes_though_what_is_left_has_no_identity() {
    let mut node = node(2);
    for name in ["a.test", "b.test", "c.test"] {
        assert_eq!(learn(&mut node, name, "1.1.1.1"), Realised::Yes);
    }
    for name in ["b.test", "c.test"] {
        assert_eq!(learn(&mut node, name, "1.1.1.2"), Realised::Yes);
    }
    // No prefix has {a, c}, and the limit is reached.
    assert_eq!(node.core.summary().fqdn_combinations, 2);
    clean(&mut node, "b.test");
    assert_eq!((open(&node, "1.1.1.1"), limited(&node)), (vec![1, 3], 0));
    assert_eq!(open(&node, "1.1.1.2"), [3]);
}

/// Kills the agent and starts it again with the state that it left, and with the same policy and endpoint.
fn restart(node: &mut Node, max: usize, checkpoint: bool) {
    // After six seconds the names are on disk.
    node.tick(node.now.plus_secs(6));
    if !checkpoint {
        node.datapath.checkpoint = None;
    }
    *node = again(node, config(max), &[107]);
    node.begin();
    node.policy(&policy(""));
    node.endpoint(spec("web", 7, "app=web"));
    node.sync();
}

/// Only the combination {a, b} has an identity. The address 1.1.1.3 with the names a, b and c has
/// {c}.
fn at_the_limit() -> Node {
    let mut node = node(1);
    for name in ["a.test", "b.test"] {
        assert_eq!(learn(&mut node, name, "1.1.1.1"), Realised::Yes);
    }
    for name in ["c.test", "a.test", "b.test"] {
        learn(&mut node, name, "1.1.1.3");
    }
    assert_eq!((open(&node, "1.1.1.3"), limited(&node)), (vec![3], 1));
    node
}

#[test]
fn a_restart_takes_nothing_from_a_limited_address() {
    let mut node = at_the_limit();
    // These are resolved before 1.1.1.3, and each has an identity again: {a, b} might then be chosen
    // for 1.1.1.3.
    for (name, address) in [
        ("a.test", "1.1.0.1"),
        ("b.test", "1.1.0.2"),
        ("c.test", "1.1.0.3"),
    ] {
        assert_eq!(learn(&mut node, name, address), Realised::Yes);
    }
    let before = node.datapath.clone();
    restart(&mut node, 1, true);
    assert_eq!((open(&node, "1.1.1.3"), limited(&node)), (vec![3], 1));
    assert_eq!(node.datapath.ipcache, before.ipcache);
    assert_eq!(node.datapath.policy, before.policy);
}

#[test]
fn a_limited_address_keeps_what_only_the_run_before_gave_a_number() {
    let mut node = at_the_limit();
    let before = node.datapath.clone();
    // With a lower limit no address that has its identity loses it.
    restart(&mut node, 0, true);
    assert_eq!(node.datapath.ipcache, before.ipcache);
    assert_eq!(node.datapath.policy, before.policy);
}

#[test]
fn what_is_in_force_counts_before_it_is_asked_for_again() {
    let mut node = at_the_limit();
    restart(&mut node, 1, true);
    let summary = node.core.summary();
    assert_eq!((summary.fqdn_combinations, limited(&node)), (1, 1));
    assert_eq!(summary.fqdn_identities, 4);
    assert_eq!(open(&node, "1.1.1.3"), [3]);
}

#[test]
fn a_lost_checkpoint_closes_nothing() {
    let mut node = at_the_limit();
    let had = node.identity("1.1.1.1");
    restart(&mut node, 0, false);
    assert_eq!(
        (open(&node, "1.1.1.1"), node.identity("1.1.1.1")),
        (vec![1, 2], had)
    );
    assert!(open(&node, "1.1.1.3").contains(&3));
    // The end of the grace, when restored labels are removed, closes nothing either.
    for secs in [1, 20] {
        node.tick(node.now.plus_secs(secs));
        assert_eq!(open(&node, "1.1.1.1"), [1, 2]);
    }
}

#[test]
fn what_waits_follows_once_there_is_room() {
    let mut node = node(1);
    for name in ["a.test", "b.test"] {
        learn(&mut node, name, "1.1.1.1");
    }
    for name in ["c.test", "b.test"] {
        learn(&mut node, name, "1.1.1.2");
    }
    assert_eq!((open(&node, "1.1.1.2"), limited(&node)), (vec![3], 1));
    clean(&mut node, "a.test");
    node.tick(node.now.plus_secs(2));
    assert_eq!((open(&node, "1.1.1.2"), limited(&node)), (vec![2, 3], 0));
    assert_eq!(
        node.core.next_deadline().map(|at| at > node.now),
        Some(true)
    );
}

#[test]
fn what_denies_is_never_limited() {
    let mut node = node(1);
    for name in ["a.test", "b.test"] {
        learn(&mut node, name, "1.1.1.1");
    }
    for name in ["b.test", "c.test"] {
        learn(&mut node, name, "1.1.1.2");
    }
    let deny = "  egressDeny:\n  - toCIDR: [1.1.1.0/24]\n    toPorts: [{ports: [{port: '2', protocol: TCP}]}]\n";
    node.policy(&policy(deny));
    let denied = |address: &str| {
        let identity = node.identity(address).unwrap();
        let key = PolicyKey::new(identity.0, EGRESS, 6, 2, 16);
        node.datapath.policy[&node.id()][&key].is_deny()
    };
    assert!(denied("1.1.1.1") && denied("1.1.1.2"));
    assert_eq!(open(&node, "1.1.1.1"), [1, 2], "with port 2 denied");
}
