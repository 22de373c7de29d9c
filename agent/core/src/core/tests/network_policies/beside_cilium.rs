//! NetworkPolicies beside CiliumNetworkPolicies at one pod, and the packets of the node.

use std::{collections::BTreeMap, net::IpAddr};

use serde_json::{Value, json};

use super::{Event, Maps, Node, PodSpec, apply, delete};

const NODE: &str = "10.0.0.1";
const WEB: &str = "10.0.0.10";
const API: &str = "10.0.0.11";
const OUT: &str = "192.0.2.1";

/// The pods web and api in the namespace shop.
fn node() -> Node {
    let mut node = Node::new();
    node.begin();
    node.event(Event::NodeAddresses(vec![NODE.parse().unwrap()]));
    for (host, app) in [(10, "web"), (11, "api")] {
        let spec = PodSpec {
            key: app.to_owned(),
            host,
            namespace: "shop",
            labels: &[("app".to_owned(), app.to_owned())].into(),
            namespace_labels: &BTreeMap::new(),
            ports: &[],
        };
        node.endpoint(spec.endpoint());
    }
    node.sync();
    node
}

fn network_policy(name: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": "shop"},
        "spec": spec,
    })
}

fn cilium_policy(name: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumNetworkPolicy",
        "metadata": {"name": name, "namespace": "shop"},
        "spec": spec,
    })
}

fn passes(node: &Node, from: &str, to: &str, port: u16) -> bool {
    let address = |text: &str| -> IpAddr { text.parse().unwrap() };
    let maps = Maps::of(node, [NODE, WEB, API, OUT].into_iter().map(address));
    maps.passes(address(from), address(to), 6, port)
}

#[test]
fn the_node_reaches_its_own_pods_through_a_closed_ingress() {
    let mut node = node();
    apply(
        &mut node,
        &network_policy("closed", &json!({"policyTypes": ["Ingress", "Egress"]})),
    );
    assert!(passes(&node, NODE, WEB, 80));
    assert!(!passes(&node, API, WEB, 80));
    assert!(!passes(&node, OUT, WEB, 80));
    assert!(!passes(&node, WEB, NODE, 80));
}

#[test]
fn allows_of_both_kinds_add_up_and_a_deny_beats_both() {
    let mut node = node();
    let web = json!({"matchLabels": {"app": "web"}});
    let ports = json!([{"port": 80}]);
    let spec = json!({"podSelector": web, "ingress": [{"ports": ports}]});
    apply(&mut node, &network_policy("web", &spec));
    assert_eq!(
        [80, 81, 82].map(|port| passes(&node, API, WEB, port)),
        [true, false, false]
    );

    let to_ports = json!([{"ports": [{"port": "81", "protocol": "TCP"}]}]);
    let spec = json!({"endpointSelector": web, "ingress": [{"toPorts": to_ports}]});
    apply(&mut node, &cilium_policy("web", &spec));
    assert_eq!(
        [80, 81, 82].map(|port| passes(&node, API, WEB, port)),
        [true, true, false]
    );

    let to_ports = json!([{"ports": [{"port": "80", "protocol": "TCP"}]}]);
    let api = json!([{"matchLabels": {"app": "api"}}]);
    let deny = json!([{"fromEndpoints": api, "toPorts": to_ports}]);
    let spec = json!({"endpointSelector": web, "ingressDeny": deny});
    apply(&mut node, &cilium_policy("deny", &spec));
    assert_eq!(
        [80, 81, 82].map(|port| passes(&node, API, WEB, port)),
        [false, true, false]
    );
    assert!(passes(&node, OUT, WEB, 80));

    delete(&mut node, "shop", "web");
    assert_eq!(
        [80, 81, 82].map(|port| passes(&node, API, WEB, port)),
        [false, true, false]
    );
    assert!(!passes(&node, OUT, WEB, 80));
}

#[test]
fn documents_of_both_kinds_with_one_name_are_two() {
    let mut node = node();
    let web = json!({"matchLabels": {"app": "web"}});
    apply(
        &mut node,
        &network_policy("web", &json!({"podSelector": web})),
    );
    let spec = json!({"endpointSelector": web, "ingress": [{}, {"fromEntities": ["all"]}]});
    apply(&mut node, &cilium_policy("web", &spec));
    assert!(passes(&node, API, WEB, 80));
    delete(&mut node, "shop", "web");
    assert!(passes(&node, API, WEB, 80));
}
