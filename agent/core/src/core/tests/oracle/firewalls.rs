//! EgressFirewalls of a history, and their verdict on a packet: the rules are read from top to bottom.

use std::net::IpAddr;

use dns_policy::name::Fqdn;
use ipnet::IpNet;
use proptest::{prelude::*, sample::select};

use super::{
    World,
    language::NAMES,
    packets::Fate,
    pod::{DEFAULT, SHOP},
};
use crate::{
    core::Event,
    policy::{
        parse::parse_documents,
        rule::{DnsNames, Ports},
    },
    source_event::SourceEvent,
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::core::tests) struct FirewallRule {
    deny: bool,
    to: To,
    /// IP protocol and port. Empty = all.
    ports: Vec<(u8, u16)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum To {
    Block(&'static str),
    Name(&'static str),
}

const BLOCKS: &[&str] = &[
    "0.0.0.0/0",
    "1.1.0.0/16",
    "1.1.1.0/24",
    "1.1.1.2/32",
    "9.9.9.9/32",
    "10.0.0.0/24",
];

/// Names and patterns in rules, each of which matches some of [`NAMES`].
const PATTERNS: &[&str] = &["*.cilium.io", "www.cilium.io", "ebpf.io"];

const PORTS: &[(u8, u16)] = &[(6, 443), (6, 450), (17, 53), (6, 53), (6, 80), (17, 443)];

/// The namespace of a firewall, and its rules; `None` removes it.
pub(super) fn firewall() -> impl Strategy<Value = (&'static str, Option<Vec<FirewallRule>>)> {
    let to = prop_oneof![
        4 => select(BLOCKS).prop_map(To::Block),
        1 => select(PATTERNS).prop_map(To::Name),
    ];
    let ports = prop_oneof![
        2 => Just(Vec::new()),
        1 => prop::collection::vec(select(PORTS), 1..4),
    ];
    let rule =
        (any::<bool>(), to, ports).prop_map(|(deny, to, ports)| FirewallRule { deny, to, ports });
    let rules = prop::option::weighted(0.8, prop::collection::vec(rule, 0..5));
    (select(&[DEFAULT, DEFAULT, SHOP][..]), rules)
}

fn written(rule: &FirewallRule) -> String {
    let kind = if rule.deny { "Deny" } else { "Allow" };
    let to = match rule.to {
        To::Block(block) => format!("cidrSelector: {block}"),
        To::Name(name) => format!("dnsName: '{name}'"),
    };
    let ports = rule.ports.iter().map(|(protocol, port)| {
        let protocol = if *protocol == 6 { "TCP" } else { "UDP" };
        format!("{{protocol: {protocol}, port: {port}}}")
    });
    let ports: Vec<String> = ports.collect();
    let ports = match ports.is_empty() {
        true => String::new(),
        false => format!(", ports: [{}]", ports.join(", ")),
    };
    format!("{{type: {kind}, to: {{{to}}}{ports}}}")
}

impl World {
    /// Adds or changes the firewall of a namespace (`Some`), or removes it.
    pub(super) fn firewall(
        &mut self,
        namespace: &'static str,
        rules: Option<&[FirewallRule]>,
    ) -> Event {
        let key = format!("EgressFirewall/{namespace}/default");
        Event::Policies(match rules {
            Some(rules) => {
                let written: Vec<String> = rules.iter().map(written).collect();
                let text = format!(
                    r"
apiVersion: k8s.ovn.org/v1
kind: EgressFirewall
metadata: {{name: default, namespace: {namespace}}}
spec: {{egress: [{}]}}
",
                    written.join(", ")
                );
                let document = parse_documents(&text, "test").remove(0).unwrap();
                self.firewalls.insert(namespace, rules.to_vec());
                self.policies.insert(key, document.clone());
                SourceEvent::Apply(document)
            }
            None => {
                self.firewalls.remove(namespace);
                self.policies.remove(&key);
                SourceEvent::Delete(key)
            }
        })
    }

    /// Rules of the firewall that an endpoint is under.
    fn firewall_of(&self, host: u8) -> &[FirewallRule] {
        let namespace = self.endpoints[&host].namespace;
        self.firewalls.get(namespace).map_or(&[], Vec::as_slice)
    }

    /// Whether the first rule that covers a packet denies it.
    pub(super) fn firewall_denies(
        &self,
        host: u8,
        remote: IpAddr,
        protocol: u8,
        port: u16,
    ) -> bool {
        let covers = |rule: &&FirewallRule| {
            (rule.ports.is_empty() || rule.ports.contains(&(protocol, port)))
                && self.is_meant(rule.to, remote)
        };
        let mut rules = self.firewall_of(host).iter();
        rules.find(covers).is_some_and(|rule| rule.deny)
    }

    /// Whether a destination covers an address. It never covers pods; a block covers nodes too, a
    /// name does not.
    fn is_meant(&self, to: To, remote: IpAddr) -> bool {
        let is_node = super::is_node(remote) || self.is_other_node(remote);
        match to {
            _ if self.pod_at(remote).is_some() => false,
            To::Block(block) => block.parse::<IpNet>().unwrap().contains(&remote),
            To::Name(_) if is_node => false,
            To::Name(pattern) => {
                let live = self.pairs.keys().filter(|(_, address)| *address == remote);
                live.map(|(name, _)| *name)
                    .any(|name| matches(pattern, name))
            }
        }
    }

    /// Whether answers that an endpoint gets at port 53 have to pass the proxy.
    pub(super) fn is_observed(&self, host: u8, protocol: u8, port: u16) -> bool {
        let rules = self.firewall_of(host);
        let has_name = rules.iter().any(|rule| matches!(rule.to, To::Name(_)));
        has_name && port == 53 && matches!(protocol, 6 | 17)
    }

    /// Whether DNS rules at port 53 limit the names: the proxy then sees no query that passes only
    /// because nothing is restricted.
    pub(super) fn limits_names(&self, host: u8) -> bool {
        let (sides, _) = self.sides(host, shared_maps::policy::EGRESS);
        let rules = sides.iter().flat_map(|side| &side.peers);
        let ports = rules.filter(|rule| !rule.deny).flat_map(|rule| &rule.ports);
        let mut at_53 = ports.filter(|port| match port.ports {
            Ports::Range(first, last) => first <= 53 && 53 <= last,
            Ports::Named(_) => true,
        });
        at_53.any(|port| match &port.dns {
            None | Some(DnsNames::All) => false,
            Some(DnsNames::Names(names)) => !format!("{names:?}").contains("Pattern(\"*\")"),
        })
    }

    /// What happens to a packet that passes, where answers may have to pass the proxy.
    pub(super) fn seen(&self, host: u8, protocol: u8, port: u16, fate: Fate) -> Fate {
        match fate {
            Fate::Passed if self.is_observed(host, protocol, port) => Fate::Proxied,
            fate => fate,
        }
    }
}

/// Whether a pattern matches a name: a star stands for one label.
fn matches(pattern: &str, name: &str) -> bool {
    assert!(NAMES.contains(&name));
    let name = Fqdn::normalise(name);
    let name = name.as_str().trim_end_matches('.');
    match pattern.strip_prefix("*.") {
        Some(rest) => name.strip_suffix(rest).is_some_and(|label| {
            label
                .strip_suffix('.')
                .is_some_and(|label| !label.contains('.'))
        }),
        None => pattern == name,
    }
}
