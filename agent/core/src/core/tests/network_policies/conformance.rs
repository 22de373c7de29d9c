//! The cases of Kubernetes' own suite: documents of policies, pods and namespaces give 9 pods on
//! two nodes their reachability on 2 ports and 3 protocols.

use std::{collections::BTreeMap, net::IpAddr};

use limits::yaml;
use netpol::{
    conformance::{
        CASES, Case, NAMESPACES, Pod, Port, Step, namespace_document, namespace_labels,
        pod_document,
    },
    policy::Protocol,
};
use serde_json::Value;

use super::{Maps, Node, spec};
use crate::{
    core::tests::pods::{Member, router},
    endpoint::spec::EndpointSpec,
};

/// Two nodes that get the same documents.
struct Cluster([Member; 2]);

fn host(pod: Pod) -> u8 {
    let at = Pod::all().position(|other| other == pod).unwrap();
    10 + u8::try_from(at).unwrap()
}

fn address(pod: Pod) -> IpAddr {
    format!("10.0.0.{}", host(pod)).parse().unwrap()
}

/// The pods called c run on the second node.
fn node_of(pod: Pod) -> usize {
    usize::from(pod.name == "c")
}

impl Cluster {
    fn new() -> Self {
        let mut cluster = Self([0, 1].map(|_| {
            let mut node = Node::new();
            node.begin();
            Member {
                node,
                router: router(),
            }
        }));
        for name in NAMESPACES {
            cluster.put(&namespace_document(name, &namespace_labels(name)));
        }
        for pod in Pod::all() {
            cluster.put(&pod_document(pod, &pod.labels(), &[address(pod)]));
            cluster.0[node_of(pod)].node.endpoint(EndpointSpec {
                labels: Vec::new(),
                pod: Some(pod.to_string()),
                ..spec(&pod.to_string(), host(pod), "none")
            });
        }
        for member in &mut cluster.0 {
            member.node.sync();
        }
        cluster
    }

    fn put(&mut self, document: &Value) {
        for member in &mut self.0 {
            member.put(&document.to_string());
        }
    }

    fn take(&mut self, step: &Step) {
        for (_, document) in step.policies() {
            self.put(&document);
        }
        for key in &step.delete {
            for member in &mut self.0 {
                member.delete(&format!("NetworkPolicy/{key}"));
            }
        }
        for (name, labels) in &step.namespaces {
            self.put(&namespace_document(name, labels));
        }
        for (name, labels) in &step.pods {
            let mut pods = Pod::all();
            let pod = pods.find(|pod| pod.to_string() == *name).unwrap();
            self.put(&pod_document(pod, labels, &[address(pod)]));
        }
    }

    /// Packets whose fate is not the expected one.
    fn differences(&self, step: &Step) -> Vec<String> {
        let maps = self.0.each_ref();
        let maps = maps.map(|member| Maps::of(&member.node, Pod::all().map(address)));
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
                // Each node judges its own pods.
                let passes =
                    |maps: &Maps| maps.passes(address(from), address(to), protocol, port.number);
                let open = maps.iter().all(passes);
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
    // The guide lists these cases.
    let blocks = cases.iter().filter(|case| case.blocks_of_pods);
    let blocks: Vec<&str> = blocks.map(|case| case.id.as_str()).collect();
    assert_eq!(blocks, ["tcp-34", "tcp-35", "tcp-36"]);
}
