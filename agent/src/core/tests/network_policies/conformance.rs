//! The cases of Kubernetes' own suite, each with the reachability of 9 pods on 2 ports and 3
//! protocols.

use std::{collections::BTreeMap, net::IpAddr};

use daemon::yaml;
use netpol::{
    conformance::{CASES, Case, NAMESPACES, Pod, Port, Step, namespace_labels},
    policy::Protocol,
};

use super::{Maps, Node, PodSpec, apply, delete};

/// Labels of a namespace or of a pod.
type Labels = BTreeMap<String, String>;

struct Cluster {
    node: Node,
    namespaces: BTreeMap<&'static str, Labels>,
    pods: BTreeMap<Pod, Labels>,
}

fn host(pod: Pod) -> u8 {
    let at = Pod::all().position(|other| other == pod).unwrap();
    10 + u8::try_from(at).unwrap()
}

fn address(pod: Pod) -> IpAddr {
    format!("10.0.0.{}", host(pod)).parse().unwrap()
}

impl Cluster {
    fn new() -> Self {
        let mut node = Node::new();
        node.begin();
        let mut cluster = Self {
            node,
            namespaces: NAMESPACES.map(|name| (name, namespace_labels(name))).into(),
            pods: Pod::all().map(|pod| (pod, pod.labels())).collect(),
        };
        cluster.endpoints();
        cluster.node.sync();
        cluster
    }

    fn endpoints(&mut self) {
        for (pod, labels) in &self.pods {
            let ports = Port::all().map(|port| format!("{}={port}", port.name()));
            let spec = PodSpec {
                key: pod.to_string(),
                host: host(*pod),
                namespace: pod.namespace,
                labels,
                namespace_labels: &self.namespaces[pod.namespace],
                ports: &ports.collect::<Vec<_>>(),
            };
            self.node.endpoint(spec.endpoint());
        }
    }

    fn take(&mut self, step: &Step) {
        for (_, document) in step.policies() {
            apply(&mut self.node, &document);
        }
        for key in &step.delete {
            let (namespace, name) = key.split_once('/').unwrap();
            delete(&mut self.node, namespace, name);
        }
        for (name, labels) in &step.namespaces {
            *self.namespaces.get_mut(name.as_str()).unwrap() = labels.clone();
        }
        for (name, labels) in &step.pods {
            let mut pods = Pod::all();
            let pod = pods.find(|pod| pod.to_string() == *name).unwrap();
            self.pods.insert(pod, labels.clone());
        }
        self.endpoints();
    }

    /// Packets whose fate is not the expected one.
    fn differences(&self, step: &Step) -> Vec<String> {
        let maps = Maps::of(&self.node, Pod::all().map(address));
        let mut found = Vec::new();
        for (from, to) in Pod::all().flat_map(|from| Pod::all().map(move |to| (from, to))) {
            // A packet of a pod to itself does not leave the pod.
            for port in Port::all().filter(|_| from != to) {
                let expected = step.is_open(from, to, port).expect("the step is about it");
                let protocol = match port.protocol {
                    Protocol::Tcp => 6,
                    Protocol::Udp => 17,
                    Protocol::Sctp => 132,
                };
                let open = maps.passes(address(from), address(to), protocol, port.number);
                if open != expected {
                    let is = if open { "open" } else { "closed" };
                    found.push(format!("{from} > {to} {port} is {is}"));
                }
            }
        }
        found
    }
}

fn cases() -> Vec<Case> {
    let documents = yaml::documents(CASES);
    let values = documents.iter().map(|document| document.value().unwrap());
    let values = values.filter(|value| !value.is_null());
    let cases = values.map(|value| Case::read(&value, |pod| address(pod).to_string()));
    cases.collect::<Result<_, _>>().unwrap()
}

#[test]
fn every_case_of_the_suite_of_kubernetes_has_its_reachability() {
    let mut failed = Vec::new();
    for case in cases() {
        let mut cluster = Cluster::new();
        for (n, step) in case.steps.iter().enumerate() {
            cluster.take(step);
            let differences = cluster.differences(step);
            if let Some(first) = differences.first() {
                let number = differences.len();
                failed.push(format!(
                    "{} ({}), step {n}: {number} differ: {first}",
                    case.id, case.case
                ));
            }
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn the_table_has_every_case_of_the_suite_once() {
    let cases = cases();
    let mut counted: BTreeMap<&str, usize> = BTreeMap::new();
    for (section, n) in cases.iter().map(|case| case.id.split_once('-').unwrap()) {
        let place = counted.entry(section).or_default();
        *place += 1;
        assert_eq!(n, format!("{place:02}"), "{section}");
    }
    assert_eq!(counted, [("sctp", 3), ("tcp", 42), ("udp", 3)].into());
    // The guide lists them.
    let blocks = cases.iter().filter(|case| case.blocks_of_pods);
    let blocks: Vec<&str> = blocks.map(|case| case.id.as_str()).collect();
    assert_eq!(blocks, ["tcp-34", "tcp-35", "tcp-36"]);
}
