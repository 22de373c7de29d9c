//! Random policies: the maps let pass what the documents allow.

use std::{collections::BTreeMap, net::IpAddr};

use proptest::{prelude::*, sample::select, strategy::ValueTree as _, test_runner::TestRunner};
use serde_json::{Value, json};

use super::{
    Maps, Node, PodSpec, apply,
    reference::{Labels, Packet, Party, Pod, allows},
};
use crate::core::Event;

/// Sets of policies, and packets judged by each.
const SETS: usize = 1_000;
const PACKETS: usize = 1_000;

const NODE: &str = "10.0.0.1";
/// Addresses in some of [`BLOCKS`] and in none.
const OUTSIDE: [&str; 5] = [
    "192.0.2.10",
    "192.0.2.200",
    "198.51.100.7",
    "203.0.113.9",
    "2001:db8::9",
];
/// Blocks, each with parts to leave out. None covers a pod or the node.
const BLOCKS: [(&str, &[&str]); 6] = [
    ("192.0.2.0/24", &["192.0.2.128/25", "192.0.2.8/29"]),
    ("192.0.2.10/32", &[]),
    ("192.0.0.0/8", &["192.0.2.0/24", "192.0.2.200/32"]),
    ("0.0.0.0/0", &["10.0.0.0/8"]),
    ("2001:db8::/32", &["2001:db8::8/125"]),
    ("128.0.0.0/1", &["198.51.100.0/24", "203.0.113.8/29"]),
];
/// Namespaces with their labels.
const NAMESPACES: [(&str, &[(&str, &str)]); 3] = [
    ("x", &[("team", "red"), ("env", "prod")]),
    ("y", &[("team", "blue")]),
    ("z", &[]),
];
/// Pods: namespace, labels, container ports.
type PodRow = (
    &'static str,
    &'static [(&'static str, &'static str)],
    &'static [(&'static str, &'static str, u16)],
);
const PODS: [PodRow; 8] = [
    (
        "x",
        &[("app", "web")],
        &[("http", "TCP", 80), ("dns", "UDP", 53)],
    ),
    (
        "x",
        &[("app", "web"), ("tier", "front")],
        &[("http", "TCP", 8080)],
    ),
    ("x", &[("app", "db")], &[("http", "UDP", 80)]),
    (
        "y",
        &[("app", "web")],
        &[("http", "TCP", 81), ("sig", "SCTP", 80)],
    ),
    ("y", &[("tier", "front")], &[]),
    ("z", &[("app", "web")], &[("dns", "TCP", 53)]),
    (
        "z",
        &[("app", "db"), ("tier", "back")],
        &[("http", "TCP", 80)],
    ),
    ("z", &[], &[]),
];
const OPERATORS: [&str; 4] = ["In", "NotIn", "Exists", "DoesNotExist"];
const PROTOCOLS: [(&str, u8); 4] = [("TCP", 6), ("UDP", 17), ("SCTP", 132), ("ICMP", 1)];
const PORTS: [u16; 9] = [1, 53, 79, 80, 81, 82, 8080, 8081, 65535];

fn labels(pairs: &[(&str, &str)]) -> Labels {
    pairs
        .iter()
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
        .collect()
}

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

fn policy() -> impl Strategy<Value = Value> {
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

/// A set of policies, with names of their own.
fn policies() -> impl Strategy<Value = Vec<Value>> {
    prop::collection::vec(policy(), 0..5).prop_map(|mut set| {
        for (n, policy) in set.iter_mut().enumerate() {
            policy["metadata"]["name"] = json!(format!("p{n}"));
        }
        set
    })
}

/// The pods, each with its address.
struct World {
    namespaces: BTreeMap<String, Labels>,
    pods: Vec<(Pod, IpAddr)>,
}

impl World {
    fn new() -> Self {
        let namespaces = NAMESPACES.map(|(name, pairs)| {
            let name_label = [("kubernetes.io/metadata.name", name)];
            let all: Vec<_> = pairs.iter().chain(&name_label).copied().collect();
            (name.to_owned(), labels(&all))
        });
        let pods = PODS
            .iter()
            .enumerate()
            .map(|(n, (namespace, pairs, ports))| {
                let ports = ports.iter().map(|(name, protocol, number)| {
                    ((*name).to_owned(), (*protocol).to_owned(), *number)
                });
                let pod = Pod {
                    namespace: (*namespace).to_owned(),
                    labels: labels(pairs),
                    ports: ports.collect(),
                };
                (pod, format!("10.0.0.{}", 10 + n).parse().unwrap())
            });
        Self {
            namespaces: namespaces.into(),
            pods: pods.collect(),
        }
    }

    fn node(&self, policies: &[Value]) -> Node {
        let mut node = Node::new();
        node.begin();
        node.event(Event::NodeAddresses(vec![NODE.parse().unwrap()]));
        for policy in policies {
            apply(&mut node, policy);
        }
        for (n, (pod, _)) in self.pods.iter().enumerate() {
            let ports = pod.ports.iter();
            let ports = ports.map(|(name, protocol, number)| format!("{name}={number}/{protocol}"));
            let spec = PodSpec {
                key: n.to_string(),
                host: 10 + u8::try_from(n).unwrap(),
                namespace: &pod.namespace,
                labels: &pod.labels,
                namespace_labels: &self.namespaces[&pod.namespace],
                ports: &ports.collect::<Vec<_>>(),
            };
            node.endpoint(spec.endpoint());
        }
        node.sync();
        node
    }

    /// Everyone who sends or receives.
    fn parties(&self) -> Vec<(Party<'_>, IpAddr)> {
        let pods = self
            .pods
            .iter()
            .map(|(pod, address)| (Party::Pod(pod), *address));
        let outside = OUTSIDE.map(|text| {
            let address = text.parse().unwrap();
            (Party::Outside(address), address)
        });
        let node = (Party::Node, NODE.parse().unwrap());
        pods.chain(outside).chain([node]).collect()
    }
}

#[test]
fn maps_let_pass_what_the_documents_allow() {
    let world = World::new();
    let parties = world.parties();
    let mut runner = TestRunner::deterministic();
    // A pod, another party by its distance in the list, and which of them sends.
    let ends = (0..PODS.len(), 1..parties.len(), any::<bool>());
    let packet = (ends, select(&PROTOCOLS[..]), select(&PORTS[..]));
    let mut passed = 0;
    for _ in 0..SETS {
        let policies = policies().new_tree(&mut runner).unwrap().current();
        let node = world.node(&policies);
        let maps = Maps::of(&node, parties.iter().map(|(_, address)| *address));
        for _ in 0..PACKETS {
            let drawn = packet.new_tree(&mut runner).unwrap().current();
            let ((pod, distance, sends), (protocol, number), port) = drawn;
            let other = (pod + distance) % parties.len();
            let (from, to) = if sends { (pod, other) } else { (other, pod) };
            // Without a port, the type of an echo request.
            let port = if protocol == "ICMP" { 8 } else { port };
            let ((from, source), (to, destination)) = (parties[from], parties[to]);
            let packet = Packet {
                from,
                to,
                protocol,
                port,
            };
            let wanted = allows(&policies, &world.namespaces, packet);
            let found = maps.passes(source, destination, number, port);
            assert_eq!(found, wanted, "{packet:?} by {policies:#?}");
            passed += usize::from(found);
        }
    }
    // Neither answer is rare.
    let share = passed * 100 / (SETS * PACKETS);
    assert!((20..=80).contains(&share), "{share} of 100 packets pass");
}
