//! Pods, outside addresses and the node, and packets between them.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use netpol::{
    cache::Object,
    name::PortName,
    packet::PacketPorts,
    pod::{Namespace, PodId},
    policy::Protocol,
};
use proptest::{prelude::*, sample::select, strategy::ValueTree as _, test_runner::TestRunner};
use serde_json::Value;

use super::{Maps, Node, PodSpec};
use crate::{
    core::{
        Event,
        tests::{
            network_policy_reading::{Labels, Packet, Party, Pod, allows},
            random_network_policies::Vocabulary,
        },
    },
    endpoint::spec::EndpointSpec,
};

const NODE: &str = "10.0.0.1";
/// Words of the policies. A block selects neither pods nor the node, even if it covers them.
pub(super) const VOCABULARY: &Vocabulary = &Vocabulary {
    namespaces: &["x", "y", "z"],
    of_pods: &[
        ("app", &["web", "db", "none"]),
        ("tier", &["front", "back"]),
    ],
    of_namespaces: &[
        ("team", &["red", "blue"]),
        ("env", &["prod"]),
        ("kubernetes.io/metadata.name", &["x", "y", "z"]),
    ],
    blocks: &[
        ("192.0.2.0/24", &["192.0.2.128/25", "192.0.2.8/29"]),
        ("192.0.2.10/32", &[]),
        ("192.0.0.0/8", &["192.0.2.0/24", "192.0.2.200/32"]),
        ("0.0.0.0/0", &["10.0.0.0/8"]),
        ("2001:db8::/32", &["2001:db8::8/125"]),
        ("128.0.0.0/1", &["198.51.100.0/24", "203.0.113.8/29"]),
    ],
    ports: &[1, 53, 79, 80, 81, 82, 8080, 8081, 65535],
    port_names: &["http", "dns", "sig", "none"],
};
/// Addresses in some of the blocks and in none.
const OUTSIDE: [&str; 5] = [
    "192.0.2.10",
    "192.0.2.200",
    "198.51.100.7",
    "203.0.113.9",
    "2001:db8::9",
];
/// A namespace: name and labels.
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

/// The cluster as the documents describe it.
pub(super) struct World {
    pub(super) policies: BTreeMap<String, Value>,
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
        namespace_labels: None,
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
        let pods = PODS.iter().enumerate().map(|(n, (of, ..))| {
            let address = format!("10.0.0.{}", 10 + n);
            let row = NAMESPACES.iter().position(|(name, _)| name == of).unwrap();
            let pod = Pod {
                namespace_labels: Some(namespace(of, row)),
                ..pod(of, n)
            };
            (pod, address.parse().unwrap())
        });
        let policies = policies.iter().enumerate();
        Self {
            policies: policies
                .map(|(n, policy)| (format!("p{n}"), policy.clone()))
                .collect(),
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
            namespace_labels: pod.namespace_labels.as_ref().unwrap(),
            ports: &ports.collect::<Vec<_>>(),
        };
        spec.endpoint()
    }

    /// A pod gets labels and ports of a row; its namespace stays.
    pub(super) fn change_pod(&mut self, node: &mut Node, n: usize, row: usize) {
        let of = &mut self.pods[n].0;
        *of = Pod {
            namespace_labels: of.namespace_labels.clone(),
            ..pod(&of.namespace, row)
        };
        node.endpoint(self.endpoint(n));
    }

    /// A namespace gets the labels of a row, and so do its pods.
    pub(super) fn change_namespace(&mut self, node: &mut Node, n: usize, row: usize) {
        let (name, _) = NAMESPACES[n];
        for n in 0..self.pods.len() {
            let (pod, _) = &mut self.pods[n];
            if pod.namespace == name {
                pod.namespace_labels = Some(namespace(name, row));
                node.endpoint(self.endpoint(n));
            }
        }
    }

    /// The objects from which enforcement by addresses starts; all pods run on one node.
    pub(super) fn objects(&self) -> Vec<Object> {
        let policies = self.policies.iter().map(|(name, policy)| {
            let mut policy = policy.clone();
            policy["metadata"]["name"] = name.as_str().into();
            Object::Policy(Arc::new(netpol::read(&policy).unwrap()))
        });
        let pods = self.pods.iter().enumerate().map(|(n, (pod, address))| {
            let ports = pod.ports.iter().map(|(name, protocol, number)| {
                let name = PortName::new(name).unwrap();
                ((name, Protocol::parse(protocol).unwrap()), *number)
            });
            Object::Pod(Arc::new(netpol::pod::Pod {
                id: PodId::new(&pod.namespace, &format!("pod-{n}")),
                labels: pod.labels.clone(),
                node: Some("one".into()),
                addresses: vec![*address],
                created: None,
                ports: ports.collect(),
            }))
        });
        let namespaces = self.pods.iter().map(|(pod, _)| {
            let labels = pod.namespace_labels.clone().unwrap();
            let name = pod.namespace.as_str().into();
            Object::Namespace(Arc::new(Namespace { name, labels }))
        });
        policies.chain(pods).chain(namespaces).collect()
    }

    /// Random packets between pods, or with the outside: as addresses, and whether the maps let
    /// them pass.
    pub(super) fn packets(
        &self,
        node: &Node,
        number: usize,
        runner: &mut TestRunner,
    ) -> Vec<(netpol::packet::Packet, bool)> {
        let outside = OUTSIDE.map(|text| text.parse().unwrap());
        let addresses: Vec<IpAddr> = self
            .pods
            .iter()
            .map(|(_, address)| *address)
            .chain(outside)
            .collect();
        let maps = Maps::of(node, addresses.iter().copied());
        let ends = (0..PODS.len(), 1..addresses.len(), any::<bool>());
        let packet = (ends, select(&PROTOCOLS[..]), select(VOCABULARY.ports));
        let packets = (0..number).filter_map(|_| {
            let ((pod, distance, sends), (name, number), port) =
                packet.new_tree(runner).unwrap().current();
            let other = (pod + distance) % addresses.len();
            let (from, to) = if sends { (pod, other) } else { (other, pod) };
            let (source, destination) = (addresses[from], addresses[to]);
            if source.is_ipv4() != destination.is_ipv4() {
                return None;
            }
            let port = if name == "ICMP" { 8 } else { port };
            let packet = netpol::packet::Packet {
                source,
                destination,
                ports: Protocol::parse(name).map(|protocol| PacketPorts {
                    protocol,
                    source: 40_000,
                    destination: port,
                }),
            };
            Some((packet, maps.passes(source, destination, number, port)))
        });
        packets.collect()
    }

    /// Every party that sends or receives.
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

    /// Judges random packets by the maps and by the documents. Gives how many of them pass.
    pub(super) fn judge(&self, node: &Node, packets: usize, runner: &mut TestRunner) -> usize {
        let parties = self.parties();
        let maps = Maps::of(node, parties.iter().map(|(_, address)| *address));
        let policies: Vec<&Value> = self.policies.values().collect();
        // A pod, another party by its distance in the list, and which of them sends.
        let ends = (0..PODS.len(), 1..parties.len(), any::<bool>());
        let packet = (ends, select(&PROTOCOLS[..]), select(VOCABULARY.ports));
        let mut passed = 0;
        for _ in 0..packets {
            let drawn = packet.new_tree(runner).unwrap().current();
            let ((pod, distance, sends), (protocol, number), port) = drawn;
            let other = (pod + distance) % parties.len();
            let (from, to) = if sends { (pod, other) } else { (other, pod) };
            // ICMP has no port: 8 is the type of an echo request.
            let port = if protocol == "ICMP" { 8 } else { port };
            let ((from, source), (to, destination)) = (parties[from], parties[to]);
            let packet = Packet {
                from,
                to,
                protocol,
                port,
            };
            let wanted = allows(&policies, packet);
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
