//! Which servers are DNS servers: the policy map, `why`, the proxy's rules and `policy trace` agree.

use std::net::{IpAddr, SocketAddr};

use dns_policy::{
    name::Fqdn,
    rule::{PortRules, RulesOf, Transport},
    table::{PolicyHandle, Question},
    verdict::Verdict,
};
use shared_maps::{IdentityId, policy::EGRESS};

use super::scenario::{Node, spec};
use crate::{
    core::{CoreConfig, why::Target},
    policy::{
        ask::{self, To},
        compute::{decide, longest},
        trace::Port,
    },
};

const DNS: &str = "10.9.0.53";
const OPENED: &str = "1.1.1.1";
const OTHER: &str = "192.0.2.99";
const UDP_53: Port = Port {
    protocol: 17,
    number: 53,
};

const TO_DNS: &str = "toCIDR: [10.9.0.53/32]";
const BY_NAME: &str = "- toFQDNs: [{matchPattern: '*.cilium.io'}]";

fn policy(servers: &str, further: &str) -> String {
    let dns = "toPorts: [{ports: [{port: '53', protocol: ANY}], rules: {dns: [{matchPattern: \
               '*.cilium.io'}]}}]";
    let first = match servers {
        "" => format!("- {dns}"),
        servers => format!("- {servers}\n    {dns}"),
    };
    format!(
        r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {{name: web}}
spec:
  endpointSelector: {{}}
  egress:
  {first}
  {further}
"
    )
}

fn firewall(rules: &str) -> String {
    format!(
        r"
---
apiVersion: k8s.ovn.org/v1
kind: EgressFirewall
metadata: {{name: default, namespace: default}}
spec:
  egress: [{rules}]
"
    )
}

fn node(policies: &str) -> Node {
    let config = CoreConfig {
        dns_servers: vec![SocketAddr::new(DNS.parse().unwrap(), 53)],
        ..CoreConfig::default()
    };
    let mut node = Node::synced(config, policies);
    node.learn("www.cilium.io", &[OPENED]);
    node
}

fn identity(node: &Node, address: &str) -> IdentityId {
    let address: IpAddr = address.parse().unwrap();
    let state = &node.core.state;
    let known = state.ipcache.identity_of(address);
    known.unwrap_or_else(|| state.world_of(address))
}

/// Whether the endpoint's policy map sends a query to this server to the proxy; `None` if it is
/// dropped.
fn proxied(node: &Node, server: &str) -> Option<bool> {
    let server = identity(node, server);
    let map = &node.datapath.policy[&node.id()];
    let lookup = |id: u32| {
        let entries = map.iter().filter(|(key, _)| key.sec_label == id);
        longest(entries, EGRESS, UDP_53.protocol, UDP_53.number)
    };
    let (_, value) = decide(lookup, server).filter(|(_, value)| !value.is_deny())?;
    Some(value.proxy_port.get() != 0)
}

fn rules(node: &Node) -> PortRules {
    let endpoint = node.core.state.endpoints.get(node.id()).unwrap();
    let subject = node.core.state.policy.subject(endpoint.identity).unwrap();
    let mut ports = subject.dns().ports.iter();
    let udp = ports.find(|port| port.port == 53 && port.transport == Transport::Udp);
    udp.cloned().unwrap()
}

/// Whether the proxy allows the name at this server.
fn allowed(node: &Node, server: &str, name: &str) -> bool {
    let table = PolicyHandle::new();
    table.replace_all(&[RulesOf {
        endpoint: node.id(),
        rules: dns_policy::rule::EndpointRules {
            ports: vec![rules(node)],
        },
    }]);
    let verdict = table.load().check(&Question {
        endpoint: node.id(),
        port: 53,
        transport: Transport::Udp,
        server: identity(node, server),
        address: server.parse().unwrap(),
        name: Fqdn::normalise(name).as_str(),
    });
    verdict == Verdict::Allow
}

/// Whether the endpoint may look the name up at this server, by the result of `why`.
fn why_has(node: &Node, server: &str, name: &str) -> bool {
    let target = Target::Name(Fqdn::normalise(name));
    let found = node.core.findings(node.id(), &target).unwrap();
    let server = identity(node, server).0;
    let mut rules = found
        .dns
        .allowed
        .iter()
        .filter(|rule| rule.protocol == "UDP");
    rules.any(|rule| {
        rule.servers
            .as_ref()
            .is_none_or(|ids| ids.contains(&server))
    })
}

/// Whether a sender with the endpoint's labels may look the name up, by the result of `policy trace`.
fn traced(node: &Node, name: &str) -> bool {
    let labels = node.core.labels_of(node.id()).unwrap();
    let to = To::Name(Fqdn::normalise(name));
    let trace = ask::trace(&node.core.repository(), &labels, &to, UDP_53, None);
    trace
        .steps
        .iter()
        .find(|step| step.step == "dns")
        .unwrap()
        .passes
}

#[test]
fn an_address_that_a_name_opens_is_a_dns_server_where_its_queries_come_to_the_proxy() {
    let https = format!("{BY_NAME}\n    toPorts: [{{ports: [{{port: '443', protocol: TCP}}]}}]");
    let world = "toEntities: [world]";
    let open = "- toCIDR: [192.0.2.0/24]";
    let deny_all = firewall("{type: Deny, to: {cidrSelector: 0.0.0.0/0}}");
    // What the policy map does with the DNS server, the opened address and another address.
    let (yes, direct, no) = (Some(true), Some(false), None);
    for (policies, wanted) in [
        (policy(TO_DNS, BY_NAME), [yes, direct, no]),
        (policy(TO_DNS, &https), [yes, no, no]),
        (policy(world, BY_NAME), [yes, yes, yes]),
        (policy("", BY_NAME), [yes, yes, yes]),
        (policy(TO_DNS, open), [yes, no, direct]),
        (
            policy(TO_DNS, "- toEntities: [world]"),
            [yes, direct, direct],
        ),
        (policy(TO_DNS, BY_NAME) + &deny_all, [no, no, no]),
    ] {
        let node = node(&policies);
        let servers = [DNS, OPENED, OTHER];
        assert_eq!(
            servers.map(|server| proxied(&node, server)),
            wanted,
            "{policies}"
        );
        for name in ["www.cilium.io", "www.example.com"] {
            let mut any = false;
            for (server, way) in servers.iter().zip(wanted) {
                let asks = way == yes && allowed(&node, server, name);
                any |= asks;
                assert_eq!(
                    why_has(&node, server, name),
                    asks,
                    "why {name} at {server}: {policies}"
                );
                let address: IpAddr = server.parse().unwrap();
                let rules = rules(&node);
                // The proxy knows nothing about dropped queries.
                if way.is_some() {
                    let sends = rules.sends_to_proxy(identity(&node, server), address);
                    assert_eq!(Some(sends), way, "explain at {server}: {policies}");
                }
            }
            assert_eq!(traced(&node, name), any, "trace {name}: {policies}");
        }
    }
}

#[test]
fn a_firewall_that_denies_the_dns_server_is_a_warning_and_why_names_its_rule() {
    let allow = "{type: Allow, to: {cidrSelector: 10.9.0.53/32}, ports: [{protocol: UDP, port: 53}, \
                 {protocol: TCP, port: 53}]}";
    let deny = "{type: Deny, to: {cidrSelector: 0.0.0.0/0}}";
    let rule = "EgressFirewall/default/default spec.egress[0] (Deny 0.0.0.0/0)";
    let found = |rules: &str| {
        let node = node(&(policy(TO_DNS, BY_NAME) + &firewall(rules)));
        let warnings = node.core.policy_warnings().join("\n");
        let target = Target::Name(Fqdn::normalise("www.cilium.io"));
        let closed = node.core.findings(node.id(), &target).unwrap().dns.closed;
        let rules = closed.iter().flat_map(|closed| &closed.rules);
        let rules: Vec<String> = rules.map(ToString::to_string).collect();
        (warnings, rules)
    };
    for rules in [deny.to_owned(), format!("{deny}, {allow}")] {
        let (warnings, closed) = found(&rules);
        let part = format!("its DNS servers (cidr:10.9.0.53/32) are denied by {rule}");
        assert!(warnings.contains(&part), "{warnings}");
        assert!(closed.contains(&rule.to_owned()), "{closed:?}");
    }
    let (warnings, closed) = found(&format!("{allow}, {deny}"));
    assert!(
        !warnings.contains("DNS servers") && closed.is_empty(),
        "{warnings}"
    );
}

#[test]
fn a_family_that_a_firewall_leaves_open_is_a_warning_where_endpoints_have_such_an_address() {
    let deny = firewall("{type: Deny, to: {cidrSelector: 0.0.0.0/0}}");
    let mut node = node(&(policy(TO_DNS, BY_NAME) + &deny));
    let open = |node: &Node, target: &str| {
        let target = match target.parse() {
            Ok(address) => Target::Address(address),
            Err(_) => Target::Name(Fqdn::normalise(target)),
        };
        node.core
            .findings(node.id(), &target)
            .unwrap()
            .open_families
    };
    assert!(!node.core.policy_warnings().join("\n").contains("IPv6"));
    assert!(open(&node, "2001:db8::1").is_empty());

    let mut both = spec("a", 7, "app=web");
    both.key = node.core.snapshot().endpoints[0].key.clone();
    both.addresses.push("fd00::7".parse().unwrap());
    node.endpoint(both);
    let warnings = node.core.policy_warnings().join("\n");
    for part in ["EgressFirewall/default/default", "IPv6 stays open", "::/0"] {
        assert!(warnings.contains(part), "{warnings}");
    }
    for target in ["2001:db8::1", "www.cilium.io"] {
        let open = open(&node, target);
        assert!(open[0].contains("IPv6 stays open"), "{open:?}");
    }
    assert!(open(&node, "192.0.2.1").is_empty());
}
