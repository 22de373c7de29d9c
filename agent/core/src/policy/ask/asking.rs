//! Whether a sender may ask for a name: some DNS server must exist to which the sender's policy
//! sends queries through the proxy, with a rule that allows the name there. The servers that rules
//! name are tried, one for each selector, and judged as packets are.

use dns_policy::{name::Fqdn, pattern::Pattern};

use super::{Outside, Step, inside, outside};
use crate::{
    ipcache::resolve::whole_families,
    labels::{K8S, Label, LabelSet, RESERVED},
    policy::{
        model::{EndpointPolicy, SideRule},
        rule::{DnsNames, PeerRule, Peers, PortRule, Ports},
        trace::{self, Decision, FlowDirection, Match, Port, RuleView, Verdict},
    },
    selector::selector::{Operator, Selector, Subject, fqdn_label},
};

/// Ports of DNS: UDP and TCP.
const DNS: [Port; 2] = [
    Port {
        protocol: 17,
        number: 53,
    },
    Port {
        protocol: 6,
        number: 53,
    },
];

/// The step of a name's look-up; `None` if nothing restricts the sender.
pub(super) fn asking(
    policy: &EndpointPolicy,
    from: &LabelSet,
    name: &Fqdn,
    addresses: &Outside,
) -> Option<Step> {
    let side = &policy.egress;
    if !side.enforced {
        return None;
    }
    let servers = servers(policy, addresses);
    let mut found: Vec<RuleView> = Vec::new();
    let mut denied: Option<Decision<'_>> = None;
    for port in ports(policy) {
        for server in &servers {
            let about = trace::about(side, FlowDirection::Egress, from, server);
            let mut allowing = about.into_iter().filter(|found| !found.rule.rule.deny);
            let allowing: Vec<Match<'_>> = allowing
                .by_ref()
                .filter(|found| allows(&found.rule.rule, port, &server.labels, name))
                .collect();
            let decision = trace::judge(side, FlowDirection::Egress, from, server, port);
            match decision.verdict {
                Verdict::Proxied => {
                    for view in allowing.iter().map(RuleView::of) {
                        if !found.contains(&view) {
                            found.push(view);
                        }
                    }
                }
                Verdict::Denied if names(&allowing) => denied = denied.or(Some(decision)),
                _ => {}
            }
        }
    }
    found.extend(unjudged(policy, &servers, name));
    let denied = denied.filter(|_| found.is_empty());
    let verdict = match (&denied, found.is_empty()) {
        (Some(_), _) => Verdict::Denied,
        (None, true) => Verdict::NoRule,
        (None, false) => Verdict::Proxied,
    };
    Some(Step {
        step: "dns".to_owned(),
        peer: Vec::new(),
        verdict: verdict.as_str().to_owned(),
        passes: verdict.passes(),
        tier: denied.as_ref().and_then(Decision::tier_view),
        rules: denied.map_or(found, |decision| decision.views()),
        other_ports: Vec::new(),
    })
}

/// Whether one of these rules has DNS names.
fn names(rules: &[Match<'_>]) -> bool {
    let mut ports = rules.iter().flat_map(|found| &found.rule.rule.ports);
    ports.any(|port| port.dns.is_some())
}

/// Whether a rule allows the name at this port of a server. A rule without DNS names allows every name
/// there, if another rule sends the query to the proxy.
fn allows(rule: &PeerRule, port: Port, server: &LabelSet, name: &Fqdn) -> bool {
    let mut ports = rule.ports.iter();
    rule.ports.is_empty()
        || ports.any(|of| {
            of.covers(port.protocol, port.number, Some(server))
                && of.dns.as_ref().is_none_or(|names| has(names, name))
        })
}

fn has(names: &DnsNames, name: &Fqdn) -> bool {
    match names {
        DnsNames::All => true,
        DnsNames::Names(list) => list
            .iter()
            .any(|rule| Pattern::parse(rule).is_ok_and(|pattern| pattern.matches(name.as_str()))),
    }
}

/// Port 53, and the other ports of DNS rules.
fn ports(policy: &EndpointPolicy) -> Vec<Port> {
    let mut found = DNS.to_vec();
    for of in dns_ports(policy) {
        for (protocol, number, _) in of.at(None) {
            let port = Port { protocol, number };
            if !found.contains(&port) {
                found.push(port);
            }
        }
    }
    found
}

fn dns_ports(policy: &EndpointPolicy) -> impl Iterator<Item = &PortRule> {
    let rules = policy.egress.rules.iter();
    let rules = rules.filter(|rule| !rule.rule.deny);
    let ports = rules.flat_map(|rule| &rule.rule.ports);
    ports.filter(|port| port.dns.is_some())
}

/// DNS rules of which no server is tried: their selectors name none, or the port has a name. They
/// count by their names alone.
fn unjudged<'a>(
    policy: &'a EndpointPolicy,
    servers: &'a [Subject],
    name: &'a Fqdn,
) -> impl Iterator<Item = RuleView> + 'a {
    let rules = policy.egress.rules.iter();
    let rules = rules.filter(|rule| !rule.rule.deny);
    let is_unjudged = |rule: &&SideRule| {
        let mut dns = rule.rule.ports.iter().filter(|port| port.dns.is_some());
        let is_tried = match &rule.rule.peers {
            Peers::Any => true,
            Peers::Selectors(list) => list
                .iter()
                .any(|selector| servers.iter().any(|server| selector.matches(server))),
        };
        dns.any(|port| {
            let is_named = matches!(port.ports, Ports::Named(_));
            let allowed = port.dns.as_ref().is_some_and(|names| has(names, name));
            allowed && (is_named || !is_tried)
        })
    };
    rules.filter(is_unjudged).map(|rule| {
        RuleView::of(&Match {
            rule,
            selector: rule.rule.selectors().next(),
            receiver: None,
        })
    })
}

/// Servers of every kind that selectors tell apart, and one for each selector of the policy.
fn servers(policy: &EndpointPolicy, addresses: &Outside) -> Vec<Subject> {
    let reserved = [
        "host",
        "remote-node",
        "kube-apiserver",
        "health",
        "ingress",
        "unmanaged",
        "init",
    ];
    let reserved = reserved.map(|key| inside(&LabelSet::new(vec![Label::new(RESERVED, key, "")])));
    let worlds = whole_families().map(|all| outside(addresses.ipcache.labels(all)));
    let anyone = inside(&LabelSet::new(Vec::new()));
    let mut found: Vec<Subject> = worlds.into_iter().chain(reserved).chain([anyone]).collect();
    let rules = policy.egress.rules.iter();
    for selector in rules.flat_map(|rule| rule.rule.selectors()) {
        let example = match selector {
            Selector::Cidr(cidr) => vec![outside(addresses.ipcache.labels(cidr.prefix))],
            Selector::Fqdn(fqdn) => whole_families()
                .map(|all| {
                    let world = addresses.ipcache.world().label(all).clone();
                    outside(LabelSet::new(vec![fqdn_label(fqdn), world]))
                })
                .to_vec(),
            Selector::Labels(labels) => {
                let labels = labels.requirements.iter().filter_map(|requirement| {
                    let value = match &requirement.operator {
                        Operator::In(values) => values.first()?,
                        Operator::Exists => "",
                        Operator::NotIn(_) | Operator::DoesNotExist => return None,
                    };
                    let source = requirement.source.as_deref().unwrap_or(K8S);
                    Some(Label::new(source, &requirement.key, value))
                });
                vec![inside(&LabelSet::new(labels.collect()))]
            }
            _ => Vec::new(),
        };
        found.extend(
            example
                .into_iter()
                .filter(|server| selector.matches(server)),
        );
    }
    found
}
