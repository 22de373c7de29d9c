//! Ingress, denies, entities and ICMP: what happens to packets under a few policies, written down
//! by hand.

use std::net::IpAddr;

use shared_maps::{
    EndpointId, IdentityId,
    policy::{EGRESS, INGRESS, PolicyKey},
};

use super::{
    oracle::{Fate, Question, fate},
    scenario::{Node, spec},
};
use crate::core::Event;

const NODE: &str = "10.0.0.1";
const WEB: &str = "10.0.0.7";
const DB: &str = "10.0.0.8";
const OUT: &str = "1.1.1.1";
const FAR: &str = "9.9.9.9";

/// A node at 10.0.0.1 with web at 10.0.0.7 and db at 10.0.0.8 under one policy.
fn node(rules: &str) -> Node {
    let mut node = Node::new();
    node.begin();
    node.event(Event::NodeAddresses(vec![NODE.parse().unwrap()]));
    node.policy(&format!(
        r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {{name: p}}
spec:
  endpointSelector: {{matchLabels: {{app: web}}}}
{rules}"
    ));
    node.endpoint(spec("web", 7, "app=web"));
    node.endpoint(spec("db", 8, "app=db"));
    node.sync();
    node
}

fn id_of(node: &Node, address: &str) -> EndpointId {
    let locations = node.core.locations();
    let address: IpAddr = address.parse().unwrap();
    locations
        .iter()
        .find(|location| location.addresses.contains(&address))
        .unwrap()
        .id
}

/// Packets of web by (direction, other side, protocol, port), each with whether it passes.
#[track_caller]
fn packets(node: &Node, table: &[(u8, &str, u8, u16, bool)]) {
    let endpoint = id_of(node, WEB);
    for (direction, remote, protocol, port, passes) in table.iter().copied() {
        let question = Question {
            endpoint,
            remote: remote.parse().unwrap(),
            direction,
            protocol,
            port,
        };
        let shall = if passes { Fate::Passed } else { Fate::Dropped };
        assert_eq!(
            fate(&node.datapath, question),
            Some(shall),
            "{question:?}, egress is {EGRESS}"
        );
    }
}

#[test]
fn an_ingress_deny_without_default_deny_closes_only_what_it_names() {
    let node = node(
        r"
  ingressDeny:
  - fromCIDR: [1.1.1.0/24]
    toPorts: [{ports: [{port: 22, protocol: TCP}]}]
  enableDefaultDeny: {ingress: false}
",
    );
    packets(
        &node,
        &[
            (INGRESS, OUT, 6, 22, false),
            (INGRESS, OUT, 6, 80, true),
            (INGRESS, OUT, 1, 8, true),
            (INGRESS, FAR, 6, 22, true),
            (INGRESS, DB, 6, 22, true),
            (EGRESS, OUT, 6, 22, true),
        ],
    );
}

#[test]
fn an_ingress_deny_alone_turns_default_deny_on() {
    let node = node("  ingressDeny:\n  - fromCIDR: [1.1.1.0/24]");
    packets(
        &node,
        &[
            (INGRESS, OUT, 6, 80, false),
            (INGRESS, FAR, 6, 80, false),
            (INGRESS, DB, 6, 80, false),
            (INGRESS, NODE, 6, 80, true),
            (EGRESS, OUT, 6, 80, true),
        ],
    );
}

#[test]
fn default_deny_can_be_asked_for_without_a_rule() {
    let node = node("  enableDefaultDeny: {ingress: true}");
    packets(
        &node,
        &[
            (INGRESS, FAR, 6, 80, false),
            (INGRESS, DB, 1, 8, false),
            (INGRESS, NODE, 6, 80, true),
            (EGRESS, FAR, 6, 80, true),
        ],
    );
}

#[test]
fn an_ingress_allow_without_default_deny_closes_nothing() {
    let node = node(
        r"
  ingress:
  - fromCIDR: [1.1.1.0/24]
    toPorts: [{ports: [{port: 80, protocol: TCP}]}]
  enableDefaultDeny: {ingress: false}
",
    );
    packets(
        &node,
        &[
            (INGRESS, OUT, 6, 80, true),
            (INGRESS, OUT, 6, 81, true),
            (INGRESS, FAR, 6, 80, true),
        ],
    );
}

#[test]
fn blocks_with_exceptions_may_send() {
    let node = node(
        r"
  ingress:
  - fromCIDRSet: [{cidr: 1.1.0.0/16, except: [1.1.1.0/24]}]
  - fromCIDR: [9.9.9.9/32]
    toPorts: [{ports: [{port: 80, endPort: 89, protocol: TCP}]}]
",
    );
    packets(
        &node,
        &[
            (INGRESS, "1.1.2.1", 6, 80, true),
            (INGRESS, OUT, 6, 80, false),
            (INGRESS, FAR, 6, 85, true),
            (INGRESS, FAR, 6, 90, false),
            (INGRESS, FAR, 17, 85, false),
            (INGRESS, "9.9.9.8", 6, 85, false),
        ],
    );
}

#[test]
fn a_deny_of_a_block_with_an_exception_spares_the_exception() {
    let node = node(
        "  ingress:\n  - fromEntities: [world]\n  ingressDeny:\n  - fromCIDRSet: [{cidr: 1.1.0.0/16, except: [1.1.1.0/24]}]",
    );
    packets(
        &node,
        &[
            (INGRESS, "1.1.2.1", 6, 80, false),
            (INGRESS, OUT, 6, 80, true),
            (INGRESS, FAR, 6, 80, true),
            (INGRESS, DB, 6, 80, false),
        ],
    );
}

#[test]
fn each_entity_means_its_own_peers() {
    // web's rule; then who may send: the world, the node, a pod.
    for (entity, world, host, pod) in [
        ("all", true, true, true),
        ("world", true, true, false),
        ("world-ipv4", true, true, false),
        ("world-ipv6", false, true, false),
        ("cluster", false, true, true),
        ("host", false, true, false),
        ("remote-node", false, true, false),
        ("none", false, true, false),
    ] {
        let node = node(&format!("  ingress:\n  - fromEntities: [{entity}]"));
        packets(
            &node,
            &[
                (INGRESS, OUT, 6, 80, world),
                (INGRESS, NODE, 6, 80, host),
                (INGRESS, DB, 6, 80, pod),
            ],
        );
    }
    // As a destination the node needs a rule, as everyone does.
    for (entity, world, host, pod) in [
        ("all", true, true, true),
        ("world", true, false, false),
        ("cluster", false, true, true),
        ("host", false, true, false),
        ("none", false, false, false),
    ] {
        let node = node(&format!("  egress:\n  - toEntities: [{entity}]"));
        packets(
            &node,
            &[
                (EGRESS, OUT, 6, 80, world),
                (EGRESS, NODE, 6, 80, host),
                (EGRESS, DB, 6, 80, pod),
            ],
        );
    }
}

#[test]
fn the_node_can_be_denied() {
    let narrow = node(
        "  ingressDeny:\n  - fromEntities: [host]\n    toPorts: [{ports: [{port: 80, protocol: TCP}]}]",
    );
    packets(
        &narrow,
        &[
            (INGRESS, NODE, 6, 80, false),
            (INGRESS, NODE, 6, 81, true),
            (INGRESS, DB, 6, 81, false),
        ],
    );
    let everyone = node("  ingress:\n  - {}\n  ingressDeny:\n  - fromEntities: [all]");
    packets(&everyone, &[(INGRESS, NODE, 6, 80, false)]);
}

#[test]
fn icmp_is_allowed_and_denied_by_type() {
    let allowed = node(
        r"
  ingress:
  - fromCIDR: [1.1.1.0/24]
    icmps: [{fields: [{type: EchoRequest}]}]
  egress:
  - icmps: [{fields: [{type: 8}, {type: 128, family: IPv6}]}]
",
    );
    packets(
        &allowed,
        &[
            (INGRESS, OUT, 1, 8, true),
            (INGRESS, OUT, 1, 3, false),
            (INGRESS, OUT, 6, 8, false),
            (INGRESS, FAR, 1, 8, false),
            (EGRESS, FAR, 1, 8, true),
            (EGRESS, DB, 1, 8, true),
            (EGRESS, FAR, 1, 0, false),
            (EGRESS, FAR, 17, 8, false),
            (EGRESS, "2001:db8::1", 58, 128, true),
            (EGRESS, "2001:db8::1", 58, 129, false),
        ],
    );
    let map = &allowed.datapath.policy[&id_of(&allowed, WEB)];
    let wanted = PolicyKey::new(IdentityId::UNKNOWN.0, EGRESS, 58, 128, 16);
    assert!(map.contains_key(&wanted), "{map:?}");
    let denied = node(
        "  ingress:\n  - fromEntities: [all]\n  ingressDeny:\n  - icmps: [{fields: [{type: 8}]}]",
    );
    packets(
        &denied,
        &[
            (INGRESS, OUT, 1, 8, false),
            (INGRESS, NODE, 1, 8, false),
            (INGRESS, OUT, 1, 0, true),
            (INGRESS, OUT, 6, 8, true),
        ],
    );
}
