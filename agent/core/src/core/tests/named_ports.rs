//! Ports by name: whose names count, and what follows when they change.

use std::net::IpAddr;

use dns_policy::rule::{Servers, Transport};
use shared_maps::{
    EndpointId,
    policy::{EGRESS, INGRESS},
};

use super::{
    oracle::{Fate, Question, check_way, fate},
    scenario::{Node, spec},
};
use crate::{
    core::{Effect, event::RulesUpdate},
    endpoint::spec::EndpointSpec,
    named_port::NamedPorts,
};

const WEB: &str = "10.0.0.7";
const ONE: &str = "10.0.0.8";
const OTHER: &str = "10.0.0.9";

fn named(key: &str, host: u8, label: &str, ports: &[&str]) -> EndpointSpec {
    let mut spec = spec(key, host, label);
    let labels = NamedPorts::parse(ports).unwrap().labels();
    spec.labels.extend(labels.iter().map(ToString::to_string));
    spec
}

/// Web, and two pods app=db whose ports called http differ.
fn node(rules: &str) -> Node {
    let mut node = Node::new();
    node.begin();
    node.policy(&format!(
        r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {{name: p}}
spec:
  endpointSelector: {{matchLabels: {{app: web}}}}
{rules}"
    ));
    node.endpoint(named("web", 7, "app=web", &["http=90"]));
    node.endpoint(named("one", 8, "app=db", &["http=80", "dns=5353/UDP"]));
    node.endpoint(named("other", 9, "app=db", &["http=8080", "dns=53/TCP"]));
    node.sync();
    node
}

fn id_of(node: &Node, address: &str) -> EndpointId {
    let locations = node.core.locations();
    let address: IpAddr = address.parse().unwrap();
    let mut locations = locations.iter();
    let location = locations.find(|location| location.addresses.contains(&address));
    location.unwrap().id
}

/// Whether TCP between web and `remote` passes web's policy.
fn passes(node: &Node, direction: u8, remote: &str, port: u16) -> bool {
    let question = Question {
        endpoint: id_of(node, WEB),
        remote: remote.parse().unwrap(),
        direction,
        protocol: 6,
        port,
    };
    fate(&node.datapath, question) == Some(Fate::Passed)
}

/// This name is another port at each side of a connection.
const HTTP_TO_DB_AND_FROM_ALL: &str = r"
  egress:
  - toEndpoints: [{matchLabels: {app: db}}]
    toPorts: [{ports: [{port: http, protocol: TCP}]}]
  ingress:
  - toPorts: [{ports: [{port: http}]}]
";

#[test]
fn a_name_is_a_port_of_whoever_receives() {
    let node = node(HTTP_TO_DB_AND_FROM_ALL);
    assert!(passes(&node, EGRESS, ONE, 80) && !passes(&node, EGRESS, ONE, 8080));
    assert!(passes(&node, EGRESS, OTHER, 8080) && !passes(&node, EGRESS, OTHER, 80));
    assert!(passes(&node, INGRESS, ONE, 90) && passes(&node, INGRESS, "9.9.9.9", 90));
    assert!(!passes(&node, INGRESS, ONE, 80));
}

#[test]
fn everyones_ports_by_name_and_by_number() {
    let node = node(
        r"
  egress:
  - toPorts: [{ports: [{port: http, protocol: TCP}, {port: '443', protocol: TCP}]}]
  egressDeny:
  - toPorts: [{ports: [{port: dns, protocol: TCP}]}]
  - toEntities: [all]
    toPorts: [{ports: [{port: dns, protocol: UDP}]}]
",
    );
    assert!(passes(&node, EGRESS, ONE, 80) && passes(&node, EGRESS, OTHER, 8080));
    assert!(passes(&node, EGRESS, ONE, 443) && passes(&node, EGRESS, "9.9.9.9", 443));
    assert!(!passes(&node, EGRESS, ONE, 8080) && !passes(&node, EGRESS, "9.9.9.9", 80));
}

#[test]
fn a_port_that_changes_its_number_moves_with_its_pod() {
    let mut node = node(HTTP_TO_DB_AND_FROM_ALL);
    let change = |node: &mut Node, key, host, label, port: &str| {
        let before = node.datapath.clone();
        node.endpoint(named(key, host, label, &[port]));
        check_way(&before, &node.datapath);
    };
    change(&mut node, "one", 8, "app=db", "http=81");
    assert!(passes(&node, EGRESS, ONE, 81) && !passes(&node, EGRESS, ONE, 80));
    change(&mut node, "web", 7, "app=web", "http=91");
    assert!(passes(&node, INGRESS, ONE, 91) && !passes(&node, INGRESS, ONE, 90));
    assert!(passes(&node, EGRESS, OTHER, 8080));
    change(&mut node, "one", 8, "app=db", "web=81");
    assert!(!passes(&node, EGRESS, ONE, 81));
}

/// Ports of the last rules for web, with the number of servers of each.
fn rules(node: &Node) -> Vec<(u16, Transport, usize)> {
    let update = node.effects.iter().find_map(|effect| match effect {
        Effect::Rules(RulesUpdate { changed, .. }) => Some(changed),
        _ => None,
    });
    let web = id_of(node, WEB);
    let rules = update.unwrap().iter().find(|rules| rules.endpoint == web);
    let ports = rules.unwrap().rules.ports.iter();
    let ports = ports.map(|port| {
        let servers = port.rules.iter().map(|rule| match &rule.servers {
            Servers::Identities(ids) => ids.len(),
            other => panic!("{other:?}"),
        });
        (port.port, port.transport, servers.sum())
    });
    ports.collect()
}

#[test]
fn dns_by_name_is_judged_where_the_servers_listen() {
    let mut node = node(
        r"
  egress:
  - toEndpoints: [{matchLabels: {app: db}}]
    toPorts: [{ports: [{port: dns}], rules: {dns: [{matchName: ebpf.io}]}}]
  - toEndpoints: [{matchLabels: {tier: back}}]
",
    );
    let both = [(53, Transport::Tcp, 1), (5353, Transport::Udp, 1)];
    assert_eq!(rules(&node), both);
    let proxied = |node: &Node, protocol, port| {
        let question = Question {
            endpoint: id_of(node, WEB),
            remote: ONE.parse().unwrap(),
            direction: EGRESS,
            protocol,
            port,
        };
        fate(&node.datapath, question) == Some(Fate::Proxied)
    };
    assert!(proxied(&node, 17, 5353) && !proxied(&node, 6, 5353) && !proxied(&node, 17, 53));
    node.endpoint(named("one", 8, "app=db", &["dns=5354/UDP"]));
    assert_eq!(
        rules(&node),
        [(53, Transport::Tcp, 1), (5354, Transport::Udp, 1)]
    );
    assert!(proxied(&node, 17, 5354) && !proxied(&node, 17, 5353));
    // A server that a rule without names allows at such a port may be asked for any name.
    node.endpoint(named("back", 10, "tier=back", &[]));
    assert_eq!(
        rules(&node),
        [(53, Transport::Tcp, 2), (5354, Transport::Udp, 2)]
    );
}

#[test]
fn a_name_that_nobody_has_is_told() {
    let mut node = node(
        r"
  egress:
  - toEndpoints: [{matchLabels: {app: db}}]
    toPorts: [{ports: [{port: https, protocol: TCP}, {port: dns}]}]
  ingress:
  - toPorts: [{ports: [{port: http, protocol: UDP}]}]
",
    );
    let warned = |node: &Node| {
        let warnings = node.core.policy_warnings();
        let mut found: Vec<String> = warnings
            .iter()
            .filter_map(|text| Some(text.split_once(": no endpoint")?.0.to_owned()))
            .collect();
        found.sort_unstable();
        found
    };
    assert_eq!(
        warned(&node),
        [
            "policy CiliumNetworkPolicy/default/p spec.egress[0]: port name https is not known (TCP https)",
            "policy CiliumNetworkPolicy/default/p spec.ingress[0]: port name http is not known (UDP http)",
        ]
    );
    node.endpoint(named("one", 8, "app=db", &["https=443/TCP", "dns=53/UDP"]));
    node.endpoint(named("web", 7, "app=web", &["http=80/UDP"]));
    assert!(warned(&node).is_empty(), "{:?}", warned(&node));
}
