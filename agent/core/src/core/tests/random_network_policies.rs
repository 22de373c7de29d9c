//! Random policies.

use proptest::{prelude::*, sample::select};
use serde_json::{Value, json};

/// A key of labels, and its values.
type Key = (&'static str, &'static [&'static str]);

/// The values from which random policies are made.
#[derive(Debug)]
pub(super) struct Vocabulary {
    pub(super) namespaces: &'static [&'static str],
    /// Labels of pods and of namespaces.
    pub(super) of_pods: &'static [Key],
    pub(super) of_namespaces: &'static [Key],
    /// Blocks, each with parts to leave out.
    pub(super) blocks: &'static [Key],
    pub(super) ports: &'static [u16],
    pub(super) port_names: &'static [&'static str],
}

const OPERATORS: [&str; 4] = ["In", "NotIn", "Exists", "DoesNotExist"];

fn selector(keys: &'static [Key]) -> BoxedStrategy<Value> {
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

fn peer(of: &'static Vocabulary) -> impl Strategy<Value = Value> {
    let block = (select(of.blocks), 0usize..3).prop_map(|((cidr, except), number)| {
        let except: Vec<&&str> = except.iter().take(number).collect();
        json!({"ipBlock": {"cidr": cidr, "except": except}})
    });
    let pod_selector = || selector(of.of_pods);
    let namespace_selector = || selector(of.of_namespaces);
    prop_oneof![
        1 => pod_selector().prop_map(|pods| json!({"podSelector": pods})),
        1 => namespace_selector().prop_map(|namespaces| json!({"namespaceSelector": namespaces})),
        1 => (pod_selector(), namespace_selector())
            .prop_map(|(pods, namespaces)| json!({"podSelector": pods, "namespaceSelector": namespaces})),
        2 => block,
    ]
}

fn port(of: &'static Vocabulary) -> impl Strategy<Value = Value> {
    let protocol = || select(vec![json!(null), json!("TCP"), json!("UDP"), json!("SCTP")]);
    prop_oneof![
        1 => protocol().prop_map(|protocol| json!({"protocol": protocol})),
        3 => (protocol(), select(of.ports)).prop_map(|(protocol, port)| json!({"protocol": protocol, "port": port})),
        2 => (protocol(), select(of.ports), select(of.ports)).prop_map(|(protocol, one, other)| {
            json!({"protocol": protocol, "port": one.min(other), "endPort": one.max(other)})
        }),
        2 => (protocol(), select(of.port_names))
            .prop_map(|(protocol, name)| json!({"protocol": protocol, "port": name})),
    ]
}

fn rules(of: &'static Vocabulary, peers: &'static str) -> impl Strategy<Value = Value> {
    let ports = prop::collection::vec(port(of), 0..3);
    let rule = (prop::collection::vec(peer(of), 0..3), ports)
        .prop_map(move |(list, ports)| json!({peers: list, "ports": ports}));
    prop_oneof![
        1 => Just(Value::Null),
        4 => prop::collection::vec(rule, 0..3).prop_map(Value::from),
    ]
}

/// A policy without a name.
pub(super) fn policy(of: &'static Vocabulary) -> impl Strategy<Value = Value> {
    let types = select(vec![
        json!(null),
        json!(["Ingress"]),
        json!(["Egress"]),
        json!(["Ingress", "Egress"]),
    ]);
    let parts = (
        select(of.namespaces),
        selector(of.of_pods),
        types,
        rules(of, "from"),
        rules(of, "to"),
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

/// Up to four random policies.
pub(super) fn policies(of: &'static Vocabulary) -> impl Strategy<Value = Vec<Value>> {
    prop::collection::vec(policy(of), 0..5)
}
