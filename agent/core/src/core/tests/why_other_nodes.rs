//! `why`: which node judges the other side, and where a port of a node leads.

use std::net::IpAddr;

use super::{
    pods::{Member, pod},
    services::{VIP, service, slice},
};
use crate::{
    core::{
        CoreConfig, Event,
        why::{Target, elsewhere::Elsewhere},
    },
    policy::trace::{FlowDirection, Port},
};

const OWN: &str = "192.0.2.1";
const OTHER: &str = "192.0.2.7";
const NODES: &str = "---\napiVersion: v1\nkind: Node\nmetadata: {name: n1}\n\
    spec: {podCIDRs: [10.1.0.0/16]}\nstatus: {addresses: [{type: InternalIP, address: 192.0.2.1}]}\n\
    ---\napiVersion: v1\nkind: Node\nmetadata: {name: worker-2}\n\
    spec: {podCIDRs: [10.2.0.0/16]}\nstatus: {addresses: [{type: InternalIP, address: 192.0.2.7}]}\n";

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn port(number: u16) -> Port {
    Port {
        protocol: 6,
        number,
    }
}

/// A node with a Service of a pod here, one elsewhere, and one that is not ready.
fn member() -> Member {
    let config = CoreConfig {
        node_name: Some("n1".to_owned()),
        ..CoreConfig::default()
    };
    let mut member = Member::with(config, "");
    member.node.event(Event::NodeAddresses(vec![ip(OWN)]));
    let db = service(
        "db",
        &format!("clusterIP: {VIP}"),
        "{port: 80, nodePort: 30080}",
    );
    let own = member.node.core.snapshot().endpoints[0].ipv4.clone();
    let own = own.expect("an address");
    let backends = [("web-0", own.as_str()), ("db-1", "10.2.0.9")];
    let ready = slice("db", &backends, "{port: 8080}");
    let late = slice("db", &[("db-2", "10.2.0.10")], "{port: 8080}")
        .replace("db-ipv4", "db-late")
        .replace("endpoints: [{", "endpoints: [{conditions: {ready: false}, ");
    let pods = pod("db-1", "db", "10.2.0.9") + &pod("db-2", "db", "10.2.0.10");
    member.put(&(NODES.to_owned() + &pods + &db + &ready + &late));
    member
}

fn worker(pod: Option<&str>) -> Option<Elsewhere> {
    Some(Elsewhere {
        pod: pod.map(str::to_owned),
        node: Some("worker-2".to_owned()),
        node_addresses: vec![ip(OTHER)],
    })
}

#[test]
fn the_node_of_a_pod_is_known_from_its_document_or_its_block() {
    let mut member = member();
    let at = |member: &Member, address: &str| member.node.core.elsewhere(ip(address));
    assert_eq!(at(&member, "10.2.0.9"), worker(Some("default/db-1")));
    // No document describes this pod yet.
    assert_eq!(at(&member, "10.2.0.99"), worker(None));
    for address in ["10.1.0.99", "1.1.1.1", OWN, OTHER, VIP] {
        assert_eq!(at(&member, address), None, "{address}");
    }
    member.delete("Node/worker-2");
    let found = at(&member, "10.2.0.9").expect("the pod's document names its node");
    assert_eq!(found.node.as_deref(), Some("worker-2"));
    assert!(found.node_addresses.is_empty());
    let target = Target::Address(ip("10.2.0.9"));
    let findings = member.node.core.findings(member.node.id(), &target);
    assert_eq!(findings.unwrap().addresses[0].elsewhere, Some(found));
}

#[test]
fn backends_have_their_endpoint_their_node_and_whether_they_are_chosen() {
    let member = member();
    let core = &member.node.core;
    let id = member.node.id();
    let identity = member.node.identity(VIP).unwrap();
    let found = core.peer(id, FlowDirection::Egress, identity, Some(port(80)));
    let of_service = found.service.expect("it is a Service").backends;
    let of_node = core.node_port(ip(OWN), port(30080)).expect("a NodePort");
    assert_eq!(of_node.service.key, "default/db");
    assert_eq!(of_node.elsewhere, None);
    for backends in [of_service, of_node.service.backends] {
        let seen = backends.iter().map(|backend| {
            let node = backend.elsewhere.as_ref();
            let node = node.and_then(|there| there.node.as_deref());
            (backend.endpoint, node, backend.is_chosen)
        });
        let mut seen: Vec<_> = seen.collect();
        seen.sort_unstable();
        let far = Some("worker-2");
        assert_eq!(
            seen,
            [
                (None, far, false),
                (None, far, true),
                (Some(id), None, true)
            ]
        );
    }
    let there = core.node_port(ip(OTHER), port(30080)).expect("a NodePort");
    assert_eq!(there.elsewhere, worker(None));
    assert!(there.service.backends.is_empty());
    for (address, number) in [(OWN, 80), (OWN, 30081), ("1.1.1.1", 30080)] {
        assert_eq!(core.node_port(ip(address), port(number)), None, "{address}");
    }
}
