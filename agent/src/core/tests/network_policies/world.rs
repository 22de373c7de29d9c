//! Pods, outside addresses and the node, and packets between them.

use std::{collections::BTreeMap, net::IpAddr};

use proptest::{prelude::*, sample::select, strategy::ValueTree as _, test_runner::TestRunner};
use serde_json::Value;

use super::{
    Maps, Node, PodSpec,
    random::PORTS,
    reference::{Labels, Packet, Party, Pod, allows},
};
use crate::{core::Event, endpoint::spec::EndpointSpec};

const NODE: &str = "10.0.0.1";
/// Addresses in some of [`BLOCKS`] and in none.
const OUTSIDE: [&str; 5] = [
    "192.0.2.10",
    "192.0.2.200",
    "198.51.100.7",
    "203.0.113.9",
    "2001:db8::9",
];
/// Namespaces with their labels.
type NamespaceRow = (&'static str, &'static [(&'static str, &'static str)]);
pub(super) const NAMESPACES: [NamespaceRow; 3] = [
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
pub(super) const PODS: [PodRow; 8] = [
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
const PROTOCOLS: [(&str, u8); 4] = [("TCP", 6), ("UDP", 17), ("SCTP", 132), ("ICMP", 1)];

fn labels(pairs: &[(&str, &str)]) -> Labels {
    pairs
        .iter()
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
        .collect()
}

/// The cluster as the documents say it is.
pub(super) struct World {
    pub(super) policies: BTreeMap<String, Value>,
    namespaces: BTreeMap<String, Labels>,
    pods: Vec<(Pod, IpAddr)>,
}

/// Labels and container ports of a row.
fn pod(namespace: &str, row: usize) -> Pod {
    let (_, pairs, ports) = PODS[row];
    let ports = ports
        .iter()
        .map(|(name, protocol, number)| ((*name).to_owned(), (*protocol).to_owned(), *number));
    Pod {
        namespace: namespace.to_owned(),
        labels: labels(pairs),
        ports: ports.collect(),
    }
}

/// Labels of a row, and the label with the namespace's name.
fn namespace(name: &str, row: usize) -> Labels {
    let (_, pairs) = NAMESPACES[row];
    let name = [("kubernetes.io/metadata.name", name)];
    let all: Vec<_> = pairs.iter().chain(&name).copied().collect();
    labels(&all)
}

impl World {
    pub(super) fn new(policies: &[Value]) -> Self {
        let namespaces = NAMESPACES.iter().enumerate();
        let namespaces = namespaces.map(|(n, (name, _))| ((*name).to_owned(), namespace(name, n)));
        let pods = PODS.iter().enumerate().map(|(n, (namespace, ..))| {
            let address = format!("10.0.0.{}", 10 + n);
            (pod(namespace, n), address.parse().unwrap())
        });
        let policies = policies.iter().enumerate();
        Self {
            policies: policies
                .map(|(n, policy)| (format!("p{n}"), policy.clone()))
                .collect(),
            namespaces: namespaces.collect(),
            pods: pods.collect(),
        }
    }

    /// An agent that starts now.
    pub(super) fn node(&self) -> Node {
        let mut node = Node::new();
        node.begin();
        node.event(Event::NodeAddresses(vec![NODE.parse().unwrap()]));
        for (name, policy) in &self.policies {
            apply(&mut node, name, policy);
        }
        for n in 0..self.pods.len() {
            node.endpoint(self.endpoint(n));
        }
        node.sync();
        node
    }

    fn endpoint(&self, n: usize) -> EndpointSpec {
        let (pod, _) = &self.pods[n];
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
        spec.endpoint()
    }

    /// A pod gets labels and ports of a row; its namespace stays.
    pub(super) fn change_pod(&mut self, node: &mut Node, n: usize, row: usize) {
        let of = &mut self.pods[n].0;
        *of = pod(&of.namespace, row);
        node.endpoint(self.endpoint(n));
    }

    /// A namespace gets the labels of a row, and its pods with it.
    pub(super) fn change_namespace(&mut self, node: &mut Node, n: usize, row: usize) {
        let (name, _) = NAMESPACES[n];
        self.namespaces
            .insert(name.to_owned(), namespace(name, row));
        for (n, (pod, _)) in self.pods.iter().enumerate() {
            if pod.namespace == name {
                node.endpoint(self.endpoint(n));
            }
        }
    }

    /// Everyone who sends or receives.
    fn parties(&self) -> Vec<(Party<'_>, IpAddr)> {
        let pods = self.pods.iter();
        let pods = pods.map(|(pod, address)| (Party::Pod(pod), *address));
        let outside = OUTSIDE.map(|text| {
            let address = text.parse().unwrap();
            (Party::Outside(address), address)
        });
        let node = (Party::Node, NODE.parse().unwrap());
        pods.chain(outside).chain([node]).collect()
    }

    /// Judges random packets by the maps and by the documents; the number of those that pass.
    pub(super) fn judge(&self, node: &Node, packets: usize, runner: &mut TestRunner) -> usize {
        let parties = self.parties();
        let maps = Maps::of(node, parties.iter().map(|(_, address)| *address));
        let policies: Vec<&Value> = self.policies.values().collect();
        // A pod, another party by its distance in the list, and which of them sends.
        let ends = (0..PODS.len(), 1..parties.len(), any::<bool>());
        let packet = (ends, select(&PROTOCOLS[..]), select(&PORTS[..]));
        let mut passed = 0;
        for _ in 0..packets {
            let drawn = packet.new_tree(runner).unwrap().current();
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
            let wanted = allows(&policies, &self.namespaces, packet);
            let found = maps.passes(source, destination, number, port);
            assert_eq!(found, wanted, "{packet:?} by {policies:#?}");
            passed += usize::from(found);
        }
        passed
    }
}

/// Puts a policy in force under a name.
pub(super) fn apply(node: &mut Node, name: &str, policy: &Value) {
    let mut policy = policy.clone();
    policy["metadata"]["name"] = name.into();
    super::apply(node, &policy);
}
