//! Policies that are valid and do not do what their author thinks.

use std::collections::BTreeSet;

use super::{
    model::{EndpointPolicy, SideRule},
    parse::PolicyDocument,
    rule::{PeerRule, Peers, Rule},
};
use crate::selector::selector::Selector;

/// What names without DNS rules lack.
const LEARNS_NOTHING: &str = "addresses are learned only from DNS answers that pass the proxy; \
                              add an egress rule to the DNS servers with toPorts.rules.dns";

fn is_by_name(rule: &PeerRule) -> bool {
    matches!(&rule.peers, Peers::Selectors(list) if list.iter().any(|s| matches!(s, Selector::Fqdn(_))))
}

fn is_dns(rule: &PeerRule) -> bool {
    !rule.deny && rule.ports.iter().any(|port| port.dns.is_some())
}

/// Rules by name of an endpoint none of whose queries passes the proxy: they open nothing.
pub fn unlearned(policy: &EndpointPolicy) -> Option<String> {
    let rules = &policy.egress.rules;
    if rules.iter().any(|rule| is_dns(&rule.rule)) {
        return None;
    }
    let place = |rule: &SideRule| format!("{} {}", rule.document, rule.rule.path);
    let by_name = rules.iter().filter(|rule| is_by_name(&rule.rule));
    let places: BTreeSet<String> = by_name.map(place).collect();
    let first = places.first()?;
    let more = match places.len() {
        1 => String::new(),
        n => format!(" and {} more", n - 1),
    };
    Some(format!(
        "toFQDNs ({first}{more}) without any DNS rule: {LEARNS_NOTHING}"
    ))
}

/// Groups that a document's rules ask for by name.
pub fn groups(document: &PolicyDocument) -> BTreeSet<&str> {
    let selectors = document.rules.iter().flat_map(Rule::selectors);
    let named = selectors.filter_map(|selector| match selector {
        Selector::Group(group) => group.name(),
        _ => None,
    });
    named.collect()
}

/// The same for documents without endpoints: one that has rules by name, while none of them
/// has a DNS rule for the same endpoints, as far as can be told without their labels.
pub fn unlearned_in(document: &PolicyDocument, all: &[&PolicyDocument]) -> Option<String> {
    let by_name = |rule: &&Rule| rule.egress.peers.iter().any(|rule| is_by_name(rule));
    let may_share = |one: &Rule, other: &Rule| {
        one.subject == other.subject
            || one
                .subject
                .requirements
                .is_subset(&other.subject.requirements)
            || other
                .subject
                .requirements
                .is_subset(&one.subject.requirements)
    };
    let rules = || all.iter().flat_map(|document| &document.rules);
    let dns = || rules().filter(|rule| rule.egress.peers.iter().any(|rule| is_dns(rule)));
    let mut named = document.rules.iter().filter(by_name);
    let lacks = named.find(|rule| !dns().any(|other| may_share(rule, other)))?;
    let path = lacks.egress.peers.iter().find(|rule| is_by_name(rule))?;
    Some(format!(
        "{}: toFQDNs without any DNS rule: {LEARNS_NOTHING}",
        path.path
    ))
}
