//! Policy maps without room for a deny: they close their own pods, and affect no others.

mod services;

use std::net::IpAddr;

use shared_maps::{EndpointId, policy::EGRESS};

use super::{
    oracle::{Fate, Question, fate},
    scenario::{Node, spec},
};
use crate::{
    core::{CoreConfig, Event, Restored},
    datapath::{
        memory::MemoryDatapath,
        plan::{Datapath as _, Step},
    },
    source_event::SourceEvent,
};

const NAMESPACE: &str = "k8s:io.kubernetes.pod.namespace";

fn pod(node: &mut Node, key: &str, host: u8, namespace: &str) -> Vec<Step> {
    let mut spec = spec(key, host, "app=web");
    spec.labels.push(format!("{NAMESPACE}={namespace}"));
    node.endpoint(spec)
}

/// Two pods: the one in namespace `small` is under a firewall, the one in `shop` is not. Their maps
/// have room for `entries` entries.
fn two_tenants(entries: usize, rules: &str) -> Node {
    let config = CoreConfig {
        policy_map_max: entries,
        dns_servers: vec!["10.9.0.53:53".parse().unwrap()],
        ..CoreConfig::default()
    };
    let mut node = Node::with(config, Restored::default(), MemoryDatapath::default());
    node.begin();
    node.policy(&firewall(rules));
    pod(&mut node, "shop", 7, "shop");
    pod(&mut node, "small", 8, "small");
    node.sync();
    node
}

fn firewall(rules: &str) -> String {
    format!(
        r"
apiVersion: k8s.ovn.org/v1
kind: EgressFirewall
metadata: {{name: default, namespace: small}}
spec: {{egress: [{rules}]}}
"
    )
}

const DENY_ALL: &str = "{type: Deny, to: {cidrSelector: 0.0.0.0/0}}";

/// A policy of another namespace with `count` blocks, each of which gets an identity.
fn blocks(count: u8) -> String {
    let blocks = (0..count).map(|n| format!("20.1.{n}.0/24"));
    let blocks: Vec<String> = blocks.collect();
    format!(
        r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {{name: blocks, namespace: many}}
spec: {{endpointSelector: {{}}, egress: [{{toCIDR: [{}]}}]}}
",
        blocks.join(", ")
    )
}

/// Allows names and two blocks to pods of namespace `shop`.
const SHOP_RULES: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: shop, namespace: shop}
spec:
  endpointSelector: {}
  egress:
  - toCIDR: [10.9.0.53/32]
    toPorts:
    - ports: [{port: "53", protocol: ANY}]
      rules: {dns: [{matchPattern: "*"}]}
  - toCIDR: [20.0.0.0/24, 20.0.1.0/24]
  - toFQDNs: [{matchPattern: "*.cilium.io"}]
"#;

fn remote(datapath: &MemoryDatapath, endpoint: EndpointId, address: &str, port: u16) -> Fate {
    let question = Question {
        endpoint,
        remote: address.parse::<IpAddr>().unwrap(),
        direction: EGRESS,
        protocol: 6,
        port,
    };
    fate(datapath, question).unwrap()
}

const SHOP: EndpointId = EndpointId(1);
const SMALL: EndpointId = EndpointId(2);

fn problems(node: &Node) -> Vec<String> {
    node.core.summary().endpoint_problems
}

/// The pod of `shop` reaches the addresses that its policy allows, although these are new on the node.
#[track_caller]
fn shop_is_as_if_alone(node: &mut Node) {
    node.policy(SHOP_RULES);
    node.learn("www.cilium.io", &["1.1.1.1"]);
    for address in ["20.0.0.1", "20.0.1.1", "1.1.1.1"] {
        assert_eq!(
            remote(&node.datapath, SHOP, address, 443),
            Fate::Passed,
            "{address}"
        );
    }
}

/// A deny without room for one pod must not close new addresses to the other pods of the node.
#[test]
fn a_deny_without_room_takes_no_address_from_another_namespace() {
    let mut node = two_tenants(30, DENY_ALL);
    node.policy(&blocks(40));
    shop_is_as_if_alone(&mut node);
    for address in ["1.1.1.1", "20.0.1.1", "20.1.3.1", "9.9.9.9"] {
        assert_eq!(
            remote(&node.datapath, SMALL, address, 443),
            Fate::Dropped,
            "{address}"
        );
    }
    assert_eq!(
        remote(&node.datapath, SMALL, "10.0.0.7", 443),
        Fate::Passed,
        "a pod is not outside"
    );
    assert_eq!(problems(&node), [""; 0], "what is denied takes no room");
}

#[test]
fn a_pod_that_comes_later_gets_what_fits_too() {
    let mut node = two_tenants(30, DENY_ALL);
    node.policy(&blocks(40));
    pod(&mut node, "late", 9, "small");
    let late = EndpointId(3);
    assert_eq!(remote(&node.datapath, late, "20.1.3.1", 443), Fate::Dropped);
    assert_eq!(remote(&node.datapath, late, "10.0.0.7", 443), Fate::Passed);
    assert_eq!(remote(&node.datapath, SMALL, "10.0.0.9", 443), Fate::Passed);
    assert_eq!(problems(&node), [""; 0]);
}

#[test]
fn allowed_addresses_without_room_are_closed_to_their_own_namespace() {
    let allow = "{type: Allow, to: {cidrSelector: 20.0.0.0/8}}, ";
    let mut node = two_tenants(30, &format!("{allow}{DENY_ALL}"));
    node.policy(&blocks(40));
    shop_is_as_if_alone(&mut node);
    let to = |n: u8| remote(&node.datapath, SMALL, &format!("20.1.{n}.1"), 443);
    let closed = (0..40).filter(|n| to(*n) == Fate::Dropped).count();
    assert!((20..40).contains(&closed), "{closed} of 40");
    assert_eq!(remote(&node.datapath, SMALL, "9.9.9.9", 443), Fate::Dropped);
    assert_eq!(remote(&node.datapath, SMALL, "10.0.0.7", 443), Fate::Passed);
    let problems = problems(&node);
    assert!(
        problems
            .iter()
            .any(|text| text.contains("(small)") && text.contains("closed to it")),
        "{problems:?}"
    );
}

/// While the entries of a map become explicit, nothing passes that is denied before and after, and
/// packets of other pods meet the same verdict.
#[test]
fn no_state_on_the_way_opens_or_affects_another_pod() {
    let mut node = two_tenants(30, DENY_ALL);
    let mut state = node.datapath.clone();
    let steps = node.policy(&blocks(40));
    let is_closing = |step: &Step| matches!(step, Step::SetPolicy(SMALL, key, value) if key.sec_label == 0 && value.is_deny());
    assert!(steps.iter().any(is_closing), "its map was not full");
    let addresses = ["1.1.1.1", "9.9.9.9", "20.1.3.1", "20.1.39.1"];
    for step in steps {
        state.apply(&step).unwrap();
        for address in addresses {
            assert_eq!(
                remote(&state, SMALL, address, 443),
                Fate::Dropped,
                "{step:?}"
            );
        }
    }
}

#[test]
fn a_map_has_entries_for_everyone_again_once_they_fit() {
    let mut node = two_tenants(30, DENY_ALL);
    let before = node.datapath.policy[&SMALL].clone();
    node.policy(&blocks(40));
    let is_for_everyone = |node: &Node| {
        let mut keys = node.datapath.policy[&SMALL].keys();
        keys.any(|key| key.sec_label == 0 && key.egress == EGRESS)
    };
    assert!(!is_for_everyone(&node));
    node.event(Event::Policies(SourceEvent::Delete(
        "CiliumNetworkPolicy/many/blocks".to_owned(),
    )));
    node.tick(node.now.plus_secs(2));
    assert_eq!(node.datapath.policy[&SMALL], before);
    assert_eq!(problems(&node), [""; 0]);
}
