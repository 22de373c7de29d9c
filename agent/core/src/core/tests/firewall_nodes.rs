//! Nodes in EgressFirewalls: by blocks of addresses, and by labels of their objects.

use super::scenario::{Node, WEB};
use crate::core::{CoreConfig, Event};

const NODES: &str = r#"
---
apiVersion: cilium.io/v2
kind: CiliumNode
metadata: {name: worker-1, labels: {region: west, rack: a}}
spec: {addresses: [{ip: 192.0.2.1, type: InternalIP}]}
---
apiVersion: cilium.io/v2
kind: CiliumNode
metadata: {name: worker-2, labels: {region: east, rack: a}}
spec: {addresses: [{ip: 192.0.2.2, type: InternalIP}], health: {ipv4: 10.2.0.9}}
---
apiVersion: v1
kind: Node
metadata: {name: worker-3, labels: {region: west, rack: a}}
status: {addresses: [{address: 198.51.100.3, type: InternalIP}]}
"#;

const FIREWALL: &str = r#"
apiVersion: k8s.ovn.org/v1
kind: EgressFirewall
metadata: {name: default, namespace: default}
spec:
  egress:
  - {type: Allow, to: {nodeSelector: {matchLabels: {region: east}}}}
  - {type: Deny, to: {cidrSelector: 192.0.2.0/24}}
  - {type: Deny, to: {cidrSelector: 0.0.0.0/0}}
"#;

fn node() -> Node {
    let config = CoreConfig {
        node_name: Some("worker-1".to_owned()),
        ..CoreConfig::default()
    };
    let mut node = Node::synced(config, &format!("{WEB}{NODES}"));
    node.event(Event::NodeAddresses(vec![
        "192.0.2.1".parse().unwrap(),
        "10.1.0.1".parse().unwrap(),
    ]));
    node
}

#[track_caller]
fn labels(node: &Node, address: &str) -> Vec<String> {
    let identity = node.identity(address).unwrap();
    node.core.state.policy.labels_of(identity).unwrap().texts()
}

/// Which of these selectors select the address.
fn selected(node: &Node, address: &str) -> Vec<String> {
    let identity = node.identity(address).unwrap().0;
    let selectors = node.core.snapshot().selectors.into_iter();
    let selecting = selectors.filter(|view| view.identities.contains(&identity));
    let mut texts: Vec<String> = selecting.map(|view| view.selector).collect();
    texts.sort_unstable();
    texts
}

#[test]
fn nodes_have_labels_that_firewalls_ask_for_and_only_then() {
    let mut node = node();
    assert_eq!(labels(&node, "192.0.2.2"), ["reserved:remote-node"]);
    let before = node.identity("192.0.2.2");
    node.policy(FIREWALL);
    assert_eq!(
        labels(&node, "192.0.2.2"),
        [
            "node:region=east",
            "node-cidr:192.0.2.0/24",
            "reserved:remote-node"
        ]
    );
    assert_eq!(
        labels(&node, "198.51.100.3"),
        [
            "node:region=west",
            "node-cidr:0.0.0.0/0",
            "reserved:remote-node"
        ]
    );
    assert_eq!(labels(&node, "10.2.0.9"), ["reserved:health"]);
    assert_eq!(
        selected(&node, "192.0.2.2"),
        ["cidr:0.0.0.0/0", "cidr:192.0.2.0/24", "node:region=east"]
    );
    assert_eq!(selected(&node, "198.51.100.3"), ["cidr:0.0.0.0/0"]);
    node.event(Event::Policies(crate::source_event::SourceEvent::Delete(
        "EgressFirewall/default/default".to_owned(),
    )));
    assert_eq!(node.identity("192.0.2.2"), before);
}

#[test]
fn addresses_of_this_node_are_judged_together() {
    let mut node = node();
    node.policy(FIREWALL);
    assert_eq!(
        labels(&node, "10.1.0.1"),
        [
            "node:region=west",
            "node-cidr:0.0.0.0/0",
            "node-cidr:192.0.2.0/24",
            "reserved:host"
        ]
    );
    assert_eq!(
        selected(&node, "10.1.0.1"),
        ["cidr:0.0.0.0/0", "cidr:192.0.2.0/24"]
    );
}

#[test]
fn blocks_of_other_policies_mean_no_nodes() {
    let mut node = node();
    let block = WEB
        .replace(
            "*.cilium.io\"}]",
            "*.cilium.io\"}]\n  - toCIDR: [192.0.2.0/24]\n  -",
        )
        .replace("metadata: {name: web}", "metadata: {name: block}");
    let block = block.split("  - toFQDNs").next().unwrap().to_owned()
        + "  - toCIDR: [192.0.2.0/24, 0.0.0.0/0]\n";
    node.policy(&block);
    node.policy(FIREWALL);
    let selectors = node.core.snapshot().selectors;
    let identity = node.identity("192.0.2.2").unwrap().0;
    let blocks = selectors
        .iter()
        .filter(|view| view.selector == "cidr:192.0.2.0/24");
    let selecting: Vec<bool> = blocks
        .map(|view| view.identities.contains(&identity))
        .collect();
    assert_eq!(selecting.len(), 2, "one means nodes, the other does not");
    assert_eq!(selecting.iter().filter(|selects| **selects).count(), 1);
}

#[test]
fn a_node_follows_the_labels_of_its_object() {
    let mut node = node();
    node.policy(FIREWALL);
    node.policy(&NODES.replace("region: east", "region: west"));
    assert!(labels(&node, "192.0.2.2").contains(&"node:region=west".to_owned()));
    assert_eq!(
        selected(&node, "192.0.2.2"),
        ["cidr:0.0.0.0/0", "cidr:192.0.2.0/24"]
    );
}

#[test]
fn nodes_whose_labels_are_unknown_are_denied_and_not_allowed() {
    let own = r#"
---
apiVersion: cilium.io/v2
kind: CiliumNode
metadata:
  name: worker-4
  labels: {app.kubernetes.io/managed-by: holdfast-agent}
spec: {addresses: [{ip: 198.51.100.4, type: InternalIP}]}
"#;
    let rules = |rules: &str| {
        format!(
            "apiVersion: k8s.ovn.org/v1\nkind: EgressFirewall\n\
             metadata: {{name: default, namespace: default}}\nspec: {{egress: [{rules}]}}"
        )
    };
    let denies = "{type: Deny, to: {nodeSelector: {matchLabels: {region: west}}}}, \
                  {type: Allow, to: {cidrSelector: 0.0.0.0/0}}";
    let allows = "{type: Allow, to: {nodeSelector: {matchExpressions: [\
                  {key: region, operator: NotIn, values: [west]}]}}}, \
                  {type: Deny, to: {cidrSelector: 0.0.0.0/0}}";
    let copied = own.replace(
        "\nspec",
        "\n  annotations: {holdfast.io/copied-labels: \"\"}\nspec",
    );
    let mut node = Node::synced(CoreConfig::default(), &format!("{WEB}{own}"));
    let warned = |node: &Node| {
        let warnings = node.core.policy_warnings();
        warnings
            .iter()
            .any(|text| text.contains("the CiliumNode of worker-4 has no labels"))
    };
    assert!(!warned(&node));
    let unknown = "node:holdfast.io/labels-unknown".to_owned();
    let address = "198.51.100.4";
    for text in [denies, allows] {
        node.policy(&rules(text));
        assert!(labels(&node, address).contains(&unknown), "{text}");
        assert!(warned(&node));
        let selectors = selected(&node, address);
        let denied = selectors.iter().any(|text| text.contains("labels-unknown"));
        // The selector of the Allow does not select it.
        assert_eq!(denied, text == denies, "{selectors:?}");
        assert!(selectors.contains(&"cidr:0.0.0.0/0".to_owned()));
    }
    node.policy(&copied);
    assert!(!labels(&node, address).contains(&unknown));
    assert!(!warned(&node));
    let selectors = selected(&node, address);
    assert_eq!(selectors.len(), 2, "{selectors:?}");
}
