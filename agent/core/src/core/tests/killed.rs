//! An agent that is killed within a plan, and policy that changed while the agent was away.

use std::collections::BTreeSet;

use proptest::prelude::*;
use shared_maps::IdentityId;

use super::{
    oracle::{Act, Group, Pod, Spec, World, acts, config, fates, parts},
    restart::{again, restarted},
};
use crate::{
    core::{CoreConfig, Event, state::services::backends::SKEW},
    datapath::plan::Datapath as _,
};

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn a_restart_changes_no_map(acts in acts()) {
        let mut world = World::new();
        for act in &acts {
            world.act(act);
        }
        // After this wait no removed pod counts as a backend, and the last learned names are in the
        // files.
        world.node.tick(world.node.now.plus_secs(SKEW));
        world.node.tick(world.node.now.plus_secs(6));
        let before = world.node.datapath.clone();
        let mut node = again(&world.node, config(), &[107, 108, 109]);
        node.begin();
        world.replay(&mut node);
        node.sync();
        prop_assert_eq!(&node.datapath.ipcache, &before.ipcache);
        prop_assert_eq!(&node.datapath.policy, &before.policy);
        prop_assert_eq!(&node.datapath.lxc, &before.lxc);
        let ids: BTreeSet<_> = before.files.keys().collect();
        prop_assert_eq!(node.datapath.files.keys().collect::<BTreeSet<_>>(), ids);
    }

    #[test]
    fn killed_between_any_two_steps(acts in acts(), cut in 0.0f64..1.0, part in parts()) {
        // If the kill prevents that a name is learned, the next run gets the name from the proxy, not from the
        // files.
        let end = acts.iter().rposition(|act| !matches!(act, Act::Learn(..)));
        let acts = end.map_or(&[][..], |end| &acts[..=end]);
        prop_assume!(!acts.is_empty());
        killed(acts, cut, part);
    }
}

#[test]
fn a_group_removed_while_the_agent_was_away_keeps_nothing_open() {
    let acts = [
        Act::Policy(0, Spec::WebAndApiToGroups),
        Act::Drop(1),
        Act::Group(0, Some(Group::ZONE_B)),
        Act::Group(0, None),
    ];
    killed(&acts, 0.0, 1);
}

#[test]
fn an_api_server_removed_while_the_agent_was_away_keeps_nothing_open() {
    let acts = [
        Act::Policy(0, Spec::ToRemoteNodesAndApiServersFromCluster),
        Act::Drop(1),
        Act::ApiServers(&["2.2.2.2", "10.0.0.9"]),
        Act::ApiServers(&[]),
    ];
    killed(&acts, 0.0, 1);
}

/// The agent is killed when this share of the last act's steps is done: the next run ends in the same
/// state as a run that finds all of them done.
fn killed(acts: &[Act], cut: f64, part: usize) {
    let (last, earlier) = acts.split_last().unwrap();
    let mut world = World::new();
    world.node.in_parts(part);
    // A pair that only its lease keeps is not restored: leases end with the agent.
    let quick = |act: &Act| {
        if let Act::Wait(_) = act {
            Act::Wait(1)
        } else {
            act.clone()
        }
    };
    for act in earlier {
        world.act(&quick(act));
    }
    world.node.tick(world.node.now.plus_secs(6));
    let before = world.node.datapath.clone();
    world.act(&quick(last));
    let steps = world.node.datapath.log.split_off(before.log.len());
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a share of a small number"
    )]
    let done = (steps.len() as f64 * cut) as usize;
    let mut cut_short = before;
    for step in steps.iter().take(done) {
        cut_short.apply(step).unwrap();
    }
    let whole = restarted(&world);
    world.node.datapath = cut_short;
    let node = restarted(&world);
    assert_eq!(fates(&node.datapath), fates(&whole.datapath), "{acts:?}");
}

/// Rules change while the agent is away, and the labels of addresses change with them.
#[test]
fn a_policy_changed_while_the_agent_was_away_comes_after_its_labels() {
    use Act::{Endpoint, Policy};
    for acts in [
        vec![
            Policy(0, Spec::NeverFromHostOn80NorBlockExceptPart),
            Policy(0, Spec::WebFromBlockExceptHalfAndPingsOfOne),
        ],
        vec![
            Policy(0, Spec::WebToCiliumNames),
            Policy(2, Spec::ToAllExceptWorldOn443),
            Policy(2, Spec::NeverFromBlock),
        ],
        vec![
            Policy(0, Spec::ToPort443FromAll),
            Policy(0, Spec::NeverFromBlock),
        ],
        vec![
            Policy(0, Spec::ToPort443FromAll),
            Policy(1, Spec::ToBlockExceptPart),
            Policy(0, Spec::WebFromBlockExceptHalfAndPingsOfOne),
        ],
        vec![
            Policy(3, Spec::ToAllExceptWorldOn443),
            Policy(0, Spec::DnsByProxyAndToDb),
            Endpoint(8, Pod::DB),
            Policy(3, Spec::ToBlockExceptPart),
        ],
    ] {
        killed(&acts, 0.0, usize::MAX);
    }
}

/// Two names that had an identity each come under one selector, and the meaning of their numbers is
/// lost.
#[test]
fn a_policy_changed_while_the_agent_was_away_opens_nothing_else_without_the_checkpoint() {
    let web = |peers: &str| format!("endpointSelector: {{matchLabels: {{app: web}}}}\n{peers}");
    let mut world = World::new();
    for (slot, peers) in [
        ("a", "  egress:\n  - toFQDNs: [{matchName: www.cilium.io}]"),
        (
            "b",
            r"
  egress:
  - toFQDNs: [{matchName: dev.cilium.io}]
    toPorts: [{ports: [{port: 80, protocol: TCP}]}]
",
        ),
    ] {
        let event = world.document(slot, Some(&web(peers)));
        world.node.event(event);
    }
    for (name, address) in [("www.cilium.io", "1.1.1.1"), ("dev.cilium.io", "2.2.2.2")] {
        world.act(&Act::Learn(name, address));
    }
    world.node.tick(world.node.now.plus_secs(6));
    let wider = r"
  egress:
  - toFQDNs: [{matchPattern: '*.cilium.io'}]
    toPorts: [{ports: [{port: 450, protocol: TCP}]}]
";
    world.document("a", Some(&web(wider)));
    world.document("b", None);
    for lost in [false, true] {
        if lost {
            world.node.datapath.checkpoint = None;
        }
        let node = restarted(&world);
        assert_ne!(node.identity("1.1.1.1"), None);
        assert_ne!(node.identity("2.2.2.2"), None);
    }
}

/// One address belonged to the node and one to the world; both belong to one name now.
#[test]
fn access_of_one_address_is_not_given_to_another_with_the_same_identity() {
    const BEFORE: &str = r"
  endpointSelector: {}
  egress:
  - toEntities: [host]
";
    const AFTER: &str = r"
  endpointSelector: {}
  egress:
  - toFQDNs: [{matchPattern: '*.cilium.io'}]
    toPorts: [{ports: [{port: 443, protocol: TCP}]}]
";
    for (own, other) in [("1.1.1.1", "2.2.2.2"), ("2.2.2.2", "1.1.1.1")] {
        let mut world = World::new();
        let event = world.document("p0", Some(BEFORE));
        world.node.event(event);
        world.node.learn("www.cilium.io", &[own, other]);
        let addresses = ["10.0.0.1", own].map(|address| address.parse().unwrap());
        world.node.event(Event::NodeAddresses(addresses.to_vec()));
        world.node.tick(world.node.now.plus_secs(6));
        assert_eq!(world.node.identity(own), Some(IdentityId::HOST));
        assert_eq!(world.node.identity(other), None);
        world.document("p0", Some(AFTER));
        let node = restarted(&world);
        assert_ne!(node.identity(own), Some(IdentityId::HOST));
        assert_eq!(node.identity(own), node.identity(other));
        assert!(node.identity(own).is_some());
    }
}

#[test]
fn an_endpoint_may_come_back_under_another_number() {
    use Act::{Endpoint, Gone, Policy};
    let acts = [
        Endpoint(9, Pod::DB),
        Endpoint(8, Pod::WEB),
        Policy(0, Spec::WebNeverToBlock),
        Gone(9),
        Endpoint(9, Pod::DB),
    ];
    killed(&acts, 0.0, usize::MAX);
}

#[test]
fn a_map_without_room_for_the_old_access_takes_the_new_policy_at_once() {
    let mut world = World::new();
    world.act(&Act::Policy(0, Spec::ToPort443FromAll));
    let full = world.node.datapath.policy.values().map(|map| map.len());
    let full = full.max().unwrap();
    world.document("p0", Some(Spec::ToBlockExceptOneAddressOn443.text()));
    let mut fitting = 0;
    for room in full..full + 16 {
        let config = CoreConfig {
            policy_map_max: room,
            ..config()
        };
        let mut node = again(&world.node, config, &[107]);
        node.begin();
        world.replay(&mut node);
        node.sync();
        let endpoints = node.core.snapshot().endpoints;
        if endpoints.iter().all(|endpoint| endpoint.problem.is_none()) {
            fitting += 1;
            let before = std::mem::replace(&mut world.node, node);
            world.check_end();
            world.node = before;
        }
    }
    assert!((1..16).contains(&fitting), "{fitting} of 16 sizes suffice");
}
