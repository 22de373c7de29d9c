//! The rules that a proxy judges queries by.

use std::collections::BTreeSet;

use dns_policy::rule::{
    EndpointRules, NameRule, NameRules, PortRules, SelectorRule, Servers, Transport,
};
use shared_maps::IdentityId;

use super::{
    observed::{self, Observed},
    service::Backend,
};
use crate::{
    labels::LabelSet,
    policy::{
        compute::dns_ports::{DnsPort, allows, dns_ports},
        model::{EndpointPolicy, Side},
        rule::{DnsNames, PeerRule, Peers, PortRule},
    },
    selector::{
        cache::{SelectorCache, SelectorId},
        selector::Selector,
    },
};

/// A port of a Service at which queries are judged, and the backends behind it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServicePortAt<'a> {
    pub identity: IdentityId,
    /// The port that clients use.
    pub at: (u16, Transport),
    pub backends: &'a BTreeSet<Backend>,
}

/// Renders the DNS rules: for each port, which servers may be queried for which names. At a port of a
/// Service, a name is allowed if rules allow it at every backend.
pub(crate) fn dns_rules(
    policy: &EndpointPolicy,
    selectors: &SelectorCache,
    services: &[ServicePortAt<'_>],
) -> EndpointRules {
    let side = &policy.egress;
    let observed = Observed::of(side);
    let mut all = judged_ports(side, selectors);
    all.extend(services.iter().map(|service| service.at));
    let ports = all.into_iter().map(|at| {
        let mut rules = Vec::new();
        for (rule, port, names) in dns_ports(side) {
            if let Some(names) = render_names(names) {
                let meant = |server: Option<&LabelSet>| is_at(port, at, server);
                add_rules(&mut rules, rule, &names, selectors, meant);
            }
        }
        // Queries to an observed port reach the proxy without a DNS rule.
        let is_observed = observed != Observed::Nothing && observed::PORTS.contains(&at);
        let every_name = match is_observed {
            true => NameRules::every_name(),
            false => NameRules::All,
        };
        for rule in allows(side) {
            let meant = |server: Option<&LabelSet>| is_plain(rule, at, server);
            add_rules(&mut rules, rule, &every_name, selectors, meant);
        }
        if observed == Observed::Everything && is_observed {
            let everyone = Servers::Any;
            add_rule(&mut rules, "any server".to_owned(), everyone, &every_name);
        }
        for service in services.iter().filter(|service| service.at == at) {
            add_service(&mut rules, side, selectors, service);
        }
        let (port, transport) = at;
        PortRules {
            port,
            transport,
            rules,
        }
    });
    EndpointRules {
        ports: ports.filter(|port| !port.rules.is_empty()).collect(),
    }
}

/// Ports that DNS rules are about, and ports whose answers are observed. For a port by name: the numbers
/// that it has at the servers that the rule selects now.
fn judged_ports(side: &Side, selectors: &SelectorCache) -> BTreeSet<DnsPort> {
    let mut found = BTreeSet::new();
    if Observed::of(side) != Observed::Nothing {
        found.extend(observed::PORTS);
    }
    for (rule, port, _) in dns_ports(side) {
        let mut add = |server: Option<&LabelSet>| {
            let at = port.at(server).filter_map(|(protocol, first, _)| {
                Some((first, Transport::from_number(protocol)?))
            });
            found.extend(at);
        };
        if port.name().is_none() {
            add(None);
        } else {
            let servers = rule.selectors().flat_map(|s| selected(s, selectors));
            servers.for_each(|id| add(selectors.labels(id)));
        }
    }
    found
}

fn selected<'a>(
    selector: &Selector,
    selectors: &'a SelectorCache,
) -> impl Iterator<Item = IdentityId> + use<'a> {
    let id = selectors.id_of(selector);
    let ids = id.and_then(|id| selectors.selections(id));
    ids.into_iter().flatten().copied()
}

fn is_at(port: &PortRule, (number, transport): DnsPort, server: Option<&LabelSet>) -> bool {
    port.covers(transport.number(), number, server)
}

/// Whether a rule allows DNS at this port of a server whatever the name.
fn is_plain(rule: &PeerRule, at: DnsPort, server: Option<&LabelSet>) -> bool {
    let mut ports = rule.ports.iter();
    rule.ports.is_empty() || ports.any(|port| port.dns.is_none() && is_at(port, at, server))
}

/// Names as the proxy takes them; `None` if no name can match.
fn render_names(names: &DnsNames) -> Option<NameRules> {
    match names {
        DnsNames::All => Some(NameRules::every_name()),
        DnsNames::Names(list) if list.is_empty() => None,
        DnsNames::Names(list) => Some(NameRules::Names(list.clone())),
    }
}

/// Adds a rule about those servers of `rule` for which `meant` is true. `meant` gets the labels of a
/// server, because a port name may mean another port at another server, or `None` for ports by number.
fn add_rules(
    rules: &mut Vec<SelectorRule>,
    rule: &PeerRule,
    names: &NameRules,
    selectors: &SelectorCache,
    meant: impl Fn(Option<&LabelSet>) -> bool,
) {
    let by_number = meant(None);
    let mut add = |selector, servers| add_rule(rules, selector, servers, names);
    match &rule.peers {
        Peers::Any if by_number => add("any server".to_owned(), Servers::Any),
        Peers::Any => {}
        Peers::Selectors(list) => {
            for selector in list {
                let ids = selected(selector, selectors);
                let ids = ids.filter(|id| by_number || meant(selectors.labels(*id)));
                let ids: BTreeSet<IdentityId> = ids.collect();
                if by_number || !ids.is_empty() {
                    add(selector.to_string(), Servers::Identities(ids));
                }
            }
        }
    }
}

/// Adds a rule, if it is not there.
fn add_rule(rules: &mut Vec<SelectorRule>, selector: String, servers: Servers, names: &NameRules) {
    let rule = SelectorRule {
        selector,
        servers,
        names: names.clone(),
    };
    if !rules.contains(&rule) {
        rules.push(rule);
    }
}

/// Adds the rule that holds at a port of a Service.
fn add_service(
    rules: &mut Vec<SelectorRule>,
    side: &Side,
    selectors: &SelectorCache,
    service: &ServicePortAt<'_>,
) {
    let Some(names) = common_names(side, selectors, service) else {
        return;
    };
    let label = selectors.labels(service.identity);
    let text = label.map(|labels| labels.texts().join(" "));
    rules.push(SelectorRule {
        selector: text.unwrap_or_default(),
        servers: Servers::Identities([service.identity].into()),
        names,
    });
}

/// Names and patterns that rules allow at every backend, compared as text: a name is left out if a
/// pattern allows it at one backend and its own text at another. `None` if nothing is left.
fn common_names(
    side: &Side,
    selectors: &SelectorCache,
    service: &ServicePortAt<'_>,
) -> Option<NameRules> {
    let (_, transport) = service.at;
    let is_observed = Observed::of(side) != Observed::Nothing;
    let mut common: Option<BTreeSet<&NameRule>> = None;
    for backend in service.backends {
        let labels = selectors.labels(backend.identity);
        let at = (backend.port, transport);
        let is_about = |rule: &PeerRule| is_selected(rule, backend.identity, selectors);
        let mut of: BTreeSet<&NameRule> = BTreeSet::new();
        let mut every = allows(side).any(|rule| is_plain(rule, at, labels) && is_about(rule));
        let mut is_limited = false;
        for (rule, port, names) in dns_ports(side) {
            if is_at(port, at, labels) && is_about(rule) {
                is_limited = true;
                match names {
                    DnsNames::All => every = true,
                    DnsNames::Names(list) => of.extend(list),
                }
            }
        }
        // Only an observed Service has a backend that no rule is about.
        every |= is_observed && !side.enforced && !is_limited;
        if !every {
            common = Some(match common {
                None => of,
                Some(before) => before.intersection(&of).copied().collect(),
            });
        }
    }
    match common {
        _ if service.backends.is_empty() => None,
        None => Some(NameRules::every_name()),
        Some(names) if names.is_empty() => None,
        Some(names) => Some(NameRules::Names(names.into_iter().cloned().collect())),
    }
}

/// Whether a rule is about an identity.
fn is_selected(rule: &PeerRule, identity: IdentityId, selectors: &SelectorCache) -> bool {
    rule.peers == Peers::Any
        || rule.selectors().any(|selector| {
            let id = selectors.id_of(selector);
            let ids = id.and_then(|id| selectors.selections(id));
            ids.is_some_and(|ids| ids.contains(&identity))
        })
}

/// Which rules decide about DNS queries.
#[derive(Debug, Default)]
pub(crate) struct DnsScope {
    /// Ports at which queries are judged.
    ports: BTreeSet<DnsPort>,
    /// Selectors whose selections the DNS rules list.
    selectors: BTreeSet<SelectorId>,
    /// Whether the ports depend on the selected servers.
    by_name: bool,
}

impl DnsScope {
    /// The scope of a policy whose selectors are registered, and of the Services at which queries are
    /// judged.
    pub(crate) fn of(
        policy: &EndpointPolicy,
        selectors: &SelectorCache,
        services: &[ServicePortAt<'_>],
    ) -> Self {
        let side = &policy.egress;
        let mut ports = judged_ports(side, selectors);
        ports.extend(services.iter().map(|service| service.at));
        let mut scope = Self {
            ports,
            selectors: BTreeSet::new(),
            by_name: dns_ports(side).any(|(_, port, _)| port.name().is_some()),
        };
        let rules = allows(side).filter(|rule| scope.is_in(rule));
        let used = rules.flat_map(PeerRule::selectors);
        scope.selectors = used.filter_map(|s| selectors.id_of(s)).collect();
        scope
    }

    /// Whether a rule decides about DNS queries.
    pub(crate) fn is_in(&self, rule: &PeerRule) -> bool {
        let names = || rule.ports.iter().any(|port| port.dns.is_some());
        // What a port name stands for depends on the servers.
        let named = || rule.ports.iter().any(|port| port.name().is_some());
        let mut ports = self.ports.iter();
        !rule.deny && (names() || ports.any(|at| named() || is_plain(rule, *at, None)))
    }

    /// Whether one of these selectors decides which servers the rules name.
    pub(crate) fn uses(&self, selectors: &[SelectorId]) -> bool {
        selectors.iter().any(|id| self.selectors.contains(id))
    }

    /// Whether the scope changes when the selected servers change: a DNS rule has a port by name.
    pub(crate) const fn is_by_name(&self) -> bool {
        self.by_name
    }
}
