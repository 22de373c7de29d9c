//! Random policies.

use proptest::{prelude::*, sample::select};
use serde_json::{Value, json};

/// Blocks, each with parts to leave out. None covers a pod or the node.
const BLOCKS: [(&str, &[&str]); 6] = [
    ("192.0.2.0/24", &["192.0.2.128/25", "192.0.2.8/29"]),
    ("192.0.2.10/32", &[]),
    ("192.0.0.0/8", &["192.0.2.0/24", "192.0.2.200/32"]),
    ("0.0.0.0/0", &["10.0.0.0/8"]),
    ("2001:db8::/32", &["2001:db8::8/125"]),
    ("128.0.0.0/1", &["198.51.100.0/24", "203.0.113.8/29"]),
];
const OPERATORS: [&str; 4] = ["In", "NotIn", "Exists", "DoesNotExist"];
/// Ports of rules and packets.
pub(super) const PORTS: [u16; 9] = [1, 53, 79, 80, 81, 82, 8080, 8081, 65535];

fn selector(keys: &'static [(&'static str, &'static [&'static str])]) -> BoxedStrategy<Value> {
    let pair = select(keys).prop_flat_map(|(key, values)| (Just(key), select(values)));
    let expression = (select(keys), select(&OPERATORS[..]), 1usize..3).prop_map(
        |((key, values), operator, number)| {
            let takes_values = matches!(operator, "In" | "NotIn");
            let values = values.iter().take(if takes_values { number } else { 0 });
            json!({"key": key, "operator": operator, "values": values.collect::<Vec<_>>()})
        },
    );
    let pairs = prop::collection::btree_map(
        pair.clone().prop_map(|(key, _)| key),
        pair.prop_map(|(_, value)| value),
        0..2,
    );
    let expressions = prop::collection::vec(expression, 0..2);
    let both = (pairs, expressions)
        .prop_map(|(pairs, list)| json!({"matchLabels": pairs, "matchExpressions": list}));
    prop_oneof![1 => Just(json!({})), 3 => both].boxed()
}

fn pod_selector() -> BoxedStrategy<Value> {
    selector(&[
        ("app", &["web", "db", "none"]),
        ("tier", &["front", "back"]),
    ])
}

fn namespace_selector() -> BoxedStrategy<Value> {
    selector(&[
        ("team", &["red", "blue"]),
        ("env", &["prod"]),
        ("kubernetes.io/metadata.name", &["x", "y", "z"]),
    ])
}

fn peer() -> impl Strategy<Value = Value> {
    let block = (select(&BLOCKS[..]), 0usize..3).prop_map(|((cidr, except), number)| {
        let number = if cidr == "0.0.0.0/0" { 1 } else { number };
        let except: Vec<&&str> = except.iter().take(number).collect();
        json!({"ipBlock": {"cidr": cidr, "except": except}})
    });
    prop_oneof![
        1 => pod_selector().prop_map(|pods| json!({"podSelector": pods})),
        1 => namespace_selector().prop_map(|namespaces| json!({"namespaceSelector": namespaces})),
        1 => (pod_selector(), namespace_selector())
            .prop_map(|(pods, namespaces)| json!({"podSelector": pods, "namespaceSelector": namespaces})),
        2 => block,
    ]
}

fn port() -> impl Strategy<Value = Value> {
    let protocol = || select(vec![json!(null), json!("TCP"), json!("UDP"), json!("SCTP")]);
    prop_oneof![
        1 => protocol().prop_map(|protocol| json!({"protocol": protocol})),
        3 => (protocol(), select(&PORTS[..])).prop_map(|(protocol, port)| json!({"protocol": protocol, "port": port})),
        2 => (protocol(), select(&PORTS[..]), select(&PORTS[..])).prop_map(|(protocol, one, other)| {
            json!({"protocol": protocol, "port": one.min(other), "endPort": one.max(other)})
        }),
        2 => (protocol(), select(vec!["http", "dns", "sig", "none"]))
            .prop_map(|(protocol, name)| json!({"protocol": protocol, "port": name})),
    ]
}

fn rules(peers: &'static str) -> impl Strategy<Value = Value> {
    let ports = prop::collection::vec(port(), 0..3);
    let rule = (prop::collection::vec(peer(), 0..3), ports)
        .prop_map(move |(list, ports)| json!({peers: list, "ports": ports}));
    prop_oneof![
        1 => Just(Value::Null),
        4 => prop::collection::vec(rule, 0..3).prop_map(Value::from),
    ]
}

/// A policy without a name.
pub(super) fn policy() -> impl Strategy<Value = Value> {
    let types = select(vec![
        json!(null),
        json!(["Ingress"]),
        json!(["Egress"]),
        json!(["Ingress", "Egress"]),
    ]);
    let parts = (
        select(vec!["x", "y", "z"]),
        pod_selector(),
        types,
        rules("from"),
        rules("to"),
    );
    parts.prop_map(|(namespace, pods, types, ingress, egress)| {
        json!({
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"namespace": namespace},
            "spec": {"podSelector": pods, "policyTypes": types, "ingress": ingress, "egress": egress},
        })
    })
}

/// A set of policies.
pub(super) fn policies() -> impl Strategy<Value = Vec<Value>> {
    prop::collection::vec(policy(), 0..5)
}
