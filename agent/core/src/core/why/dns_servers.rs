//! DNS servers of endpoints, by the entries of their policy maps. A server counts for an endpoint whose queries to it
//! come to the proxy. A rule such as `toFQDNs` without `toPorts` also opens port 53 of other addresses, but does not
//! make them DNS servers: queries to them bypass the proxy, and nothing is learned.

use std::collections::BTreeSet;

use dns_policy::rule::{EndpointRules, NameRules, PortRules, SelectorRule, Servers};
use shared_maps::{IdentityId, policy::EGRESS};

use crate::{
    core::{
        Core,
        state::{State, policy_model::subject::Subject},
        why::Target,
    },
    endpoint::endpoint::Endpoint,
    first_of::first_of,
    policy::{
        compute::{decide, everyone_at, longest},
        lint::firewalls::{self, ALLOW_BEFORE},
        trace::{FlowDirection, Port, RuleView},
    },
};

/// Maximum number of endpoints that a warning names.
const NAMED: usize = 5;

/// Where a query to a server goes, by the policy maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::core) enum Way {
    /// It comes to the proxy.
    Proxied,
    /// It passes without the proxy.
    Direct,
    /// It is dropped.
    Closed,
}

/// DNS servers of rules about a name.
#[derive(Debug, Default)]
pub(in crate::core) struct ServersOf {
    /// The rules, with the servers to which queries go through the proxy.
    pub rules: EndpointRules,
    /// Selectors of servers to which queries pass without the proxy.
    pub direct: Vec<String>,
    /// Selectors whose servers are all closed, each with one of these servers and the port.
    pub closed: Vec<(String, IdentityId, Port)>,
}

/// Judges the servers of rules by the policy of their endpoint.
struct Judge<'a> {
    subject: &'a Subject,
    /// Identities of the trusted DNS servers.
    trusted: BTreeSet<IdentityId>,
    /// Identities of unknown addresses outside the cluster.
    worlds: Vec<IdentityId>,
}

/// Result for queries to the servers of a rule.
enum Judged {
    /// Queries to the servers of this rule come to the proxy.
    Counts(SelectorRule),
    /// Some queries pass without the proxy, the others are dropped.
    Direct,
    /// All queries are dropped, among them the queries to this server.
    Closed(IdentityId),
}

impl Judge<'_> {
    /// Judges the servers of a rule; `None` if the rule names no server.
    fn judge(&self, rule: &SelectorRule, port: &PortRules) -> Option<Judged> {
        if !self.is_known(rule) {
            return Some(Judged::Counts(rule.clone()));
        }
        let candidates = self.candidates(rule, port);
        let way = |id: &IdentityId| Way::of(self.subject, *id, port_of(port));
        let proxied = candidates.iter().filter(|id| way(id) == Way::Proxied);
        let proxied: BTreeSet<IdentityId> = proxied.copied().collect();
        if !proxied.is_empty() {
            let servers = match &rule.servers {
                Servers::Any if rule.names != NameRules::All => Servers::Any,
                _ => Servers::Identities(proxied),
            };
            return Some(Judged::Counts(SelectorRule {
                servers,
                ..rule.clone()
            }));
        }
        if candidates.iter().any(|id| way(id) == Way::Direct) {
            return Some(Judged::Direct);
        }
        let mut trusted = candidates.iter().filter(|id| self.trusted.contains(id));
        let first = trusted.next().or(candidates.first())?;
        Some(Judged::Closed(*first))
    }

    /// Identities of servers that a rule means.
    fn candidates(&self, rule: &SelectorRule, port: &PortRules) -> BTreeSet<IdentityId> {
        match &rule.servers {
            Servers::Identities(ids) => ids.clone(),
            Servers::Any => identities(port)
                .chain(self.trusted.iter().copied())
                .chain(self.worlds.iter().copied())
                .collect(),
            // Only restored rules have prefixes.
            Servers::Prefixes(_) => BTreeSet::new(),
        }
    }

    /// Whether the candidates are all the servers that a rule means.
    fn is_known(&self, rule: &SelectorRule) -> bool {
        match &rule.servers {
            Servers::Identities(ids) => !ids.is_empty(),
            // Without trusted servers, a rule with names may mean servers that are not known.
            Servers::Any => rule.names == NameRules::All || !self.trusted.is_empty(),
            Servers::Prefixes(_) => false,
        }
    }
}

impl Way {
    /// The way of a query by the intended entries of a subject's policy maps.
    pub(in crate::core) fn of(subject: &Subject, server: IdentityId, port: Port) -> Self {
        let lookup = |id: u32| {
            let (protocol, number) = match id {
                0 => everyone_at(server, port.protocol, port.number),
                _ => (port.protocol, port.number),
            };
            let entries = subject.entries(IdentityId(id)).into_iter().flatten();
            longest(entries, EGRESS, protocol, number)
        };
        match decide(lookup, server) {
            None => Self::Closed,
            Some((_, value)) if value.is_deny() => Self::Closed,
            Some((_, value)) if value.proxy_port.get() == 0 => Self::Direct,
            Some(_) => Self::Proxied,
        }
    }
}

impl State {
    /// Identities of the trusted DNS servers, as far as they are known.
    fn trusted_identities(&self) -> BTreeSet<IdentityId> {
        let servers = self.resolved.trusted_servers().iter();
        servers
            .map(|server| {
                let address = server.ip();
                let known = self.ipcache.identity_of(address);
                known.unwrap_or_else(|| self.world_of(address))
            })
            .collect()
    }

    /// Which servers of an endpoint's DNS rules count. `rules` are its rules, or some of them.
    pub(in crate::core) fn dns_servers_of(
        &self,
        endpoint: &Endpoint,
        rules: &EndpointRules,
    ) -> ServersOf {
        let mut found = ServersOf::default();
        let Some(subject) = self.policy.subject(endpoint.identity) else {
            return found;
        };
        let judge = Judge {
            subject,
            trusted: self.trusted_identities(),
            worlds: self.worlds_of(endpoint),
        };
        for port in &rules.ports {
            let mut kept = Vec::new();
            for rule in &port.rules {
                match judge.judge(rule, port) {
                    Some(Judged::Counts(rule)) => kept.push(rule),
                    Some(Judged::Direct) => note(&mut found.direct, &rule.selector),
                    Some(Judged::Closed(server)) => {
                        let selector = rule.selector.clone();
                        found.closed.push((selector, server, port_of(port)));
                    }
                    None => {}
                }
            }
            if !kept.is_empty() {
                found.rules.ports.push(PortRules {
                    rules: kept,
                    ..port.clone()
                });
            }
        }
        found
    }

    /// EgressFirewalls that leave open a family of which an endpoint of this node has an address.
    fn open_families(&self) -> impl Iterator<Item = String> {
        let has = |is_ipv4: bool| {
            let mut addresses = self.endpoints.iter().flat_map(Endpoint::addresses);
            addresses.any(|address| address.is_ipv4() == is_ipv4)
        };
        let (has_ipv4, has_ipv6) = (has(true), has(false));
        let documents = self.policy.repository().iter();
        documents.filter_map(move |document| {
            let open = firewalls::open_family(document)?;
            let is_used = match open.is_ipv4 {
                true => has_ipv4,
                false => has_ipv6,
            };
            is_used.then(|| format!("policy {}: {}", document.key, open.text))
        })
    }
}

impl State {
    /// EgressFirewalls of an endpoint that leave open a family of which the endpoint has an
    /// address, and of which the target has or may have one.
    pub(in crate::core) fn open_families_of(
        &self,
        endpoint: &Endpoint,
        target: &Target,
    ) -> Vec<String> {
        let Some(subject) = self.policy.subject(endpoint.identity) else {
            return Vec::new();
        };
        let tier = subject.policy().egress.tier.iter();
        let keys: BTreeSet<&str> = tier.map(|rule| &*rule.document).collect();
        let documents = keys
            .into_iter()
            .filter_map(|key| self.policy.repository().get(key));
        let open = documents.filter_map(|document| {
            let open = firewalls::open_family(document)?;
            let is_meant = match target {
                Target::Address(address) => address.is_ipv4() == open.is_ipv4,
                Target::Name(_) => true,
            };
            let mut own = endpoint.addresses();
            let has_family = own.any(|address| address.is_ipv4() == open.is_ipv4);
            (is_meant && has_family).then(|| format!("{} {}", document.key, open.text))
        });
        open.collect()
    }
}

impl Core {
    /// EgressFirewalls that leave a family open, and those that close the DNS servers of their pods.
    pub(in crate::core) fn firewall_warnings(&self) -> Vec<String> {
        let state = &self.state;
        let mut found: Vec<String> = state.open_families().collect();
        let subjects = state.policy.subjects().map(|(_, subject)| subject);
        for subject in subjects.filter(|subject| subject.has_tier()) {
            let endpoints = subject.endpoints();
            let first = endpoints.first().and_then(|id| state.endpoints.get(*id));
            let Some(first) = first else { continue };
            let mut closed = state.dns_servers_of(first, subject.dns()).closed;
            closed.dedup_by(|one, other| one.0 == other.0);
            for (selector, server, at) in closed {
                let rules = self
                    .peer(first.id, FlowDirection::Egress, server, Some(at))
                    .deciding();
                let rules: Vec<String> = rules.iter().map(RuleView::to_string).collect();
                if rules.is_empty() {
                    continue;
                }
                found.push(format!(
                    "endpoint {}: its DNS servers ({selector}) are denied by {}: no query of it is \
                     answered; {ALLOW_BEFORE}",
                    first_of(endpoints, NAMED),
                    rules.join("; "),
                ));
            }
        }
        found
    }
}

fn port_of(port: &PortRules) -> Port {
    Port {
        protocol: port.transport.number(),
        number: port.port,
    }
}

fn identities(port: &PortRules) -> impl Iterator<Item = IdentityId> {
    port.rules.iter().flat_map(|rule| match &rule.servers {
        Servers::Identities(ids) => ids.iter().copied().collect::<Vec<_>>(),
        Servers::Any | Servers::Prefixes(_) => Vec::new(),
    })
}

fn note(list: &mut Vec<String>, text: &str) {
    if !list.iter().any(|known| known == text) {
        list.push(text.to_owned());
    }
}
