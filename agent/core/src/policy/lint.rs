//! Warnings about valid policies that probably do not have the intended effect.

pub mod firewalls;
pub mod foreign_servers;
pub mod own_addresses;
pub mod pruned;

use std::collections::{BTreeMap, BTreeSet};

use super::{
    compute::Observed,
    document::PolicyDocument,
    model::{EndpointPolicy, SideRule},
    rule::{PeerRule, Peers, Rule},
};
use crate::{
    first_of::first_of,
    labels::{K8S, Label, LabelSet},
    selector::{
        cache::SelectorCache,
        selector::{Operator, Selector},
    },
};

/// Remedy for rules with names whose endpoints have no DNS rules.
const LEARNS_NOTHING: &str = "addresses are learned only from DNS answers that pass the proxy; \
                              add an egress rule to the DNS servers with toPorts.rules.dns";

fn is_by_name(rule: &PeerRule) -> bool {
    matches!(&rule.peers, Peers::Selectors(list) if list.iter().any(|s| matches!(s, Selector::Fqdn(_))))
}

fn is_dns(rule: &PeerRule) -> bool {
    !rule.deny && rule.ports.iter().any(|port| port.dns.is_some())
}

/// A warning about rules by name of an endpoint whose queries never pass the proxy: such rules open
/// nothing.
pub(crate) fn unlearned(policy: &EndpointPolicy) -> Option<String> {
    let rules = &policy.egress.rules;
    let observed = Observed::of(&policy.egress) != Observed::Nothing;
    if observed || rules.iter().any(|rule| is_dns(&rule.rule)) {
        return None;
    }
    let place = |rule: &SideRule| format!("{} {}", rule.document, rule.rule.path);
    let by_name = rules.iter().filter(|rule| is_by_name(&rule.rule));
    let places: BTreeSet<String> = by_name.map(place).collect();
    (!places.is_empty()).then(|| {
        let places = first_of(&places, 1);
        format!("toFQDNs ({places}) without any DNS rule: {LEARNS_NOTHING}")
    })
}

/// Warnings about port names in rules that no receiver has: they select nothing. The rules are
/// those of `subjects`, each with its labels.
pub(crate) fn unknown_ports<'a>(
    subjects: impl Iterator<Item = (&'a EndpointPolicy, &'a LabelSet)>,
    selectors: &SelectorCache,
) -> Vec<String> {
    let of_a_peer = |rule: &PeerRule, has: &dyn Fn(&LabelSet) -> bool| {
        let ids = rule.selectors().filter_map(|s| selectors.id_of(s));
        let ids = ids.filter_map(|id| selectors.selections(id)).flatten();
        let mut labels = ids.filter_map(|id| selectors.labels(*id));
        labels.any(has)
    };
    let mut known: BTreeMap<String, bool> = BTreeMap::new();
    for (policy, own) in subjects {
        let egress = policy.egress.rules.iter().map(|rule| (rule, true));
        let ingress = policy.ingress.rules.iter().map(|rule| (rule, false));
        for (SideRule { document, rule }, egress) in egress.chain(ingress) {
            for port in &rule.ports {
                let Some(name) = port.name() else { continue };
                let who = if egress { "it selects" } else { "it is about" };
                let text = format!(
                    "policy {document} {}: port name {name} is not known ({port}): no endpoint \
                     {who} has it, and so it means nothing; `endpoint add --named-port` and \
                     `named-ports` in endpoint documents name ports",
                    rule.path
                );
                let has = |labels: &LabelSet| port.at(Some(labels)).next().is_some();
                match known.get(&text) {
                    // A rule's peers are the same for every subject.
                    Some(_) if egress => {}
                    Some(true) => {}
                    _ => {
                        let found = if egress {
                            of_a_peer(rule, &has)
                        } else {
                            has(own)
                        };
                        known.insert(text, found);
                    }
                }
            }
        }
    }
    let unknown = known.into_iter().filter(|(_, known)| !known);
    unknown.map(|(text, _)| text).collect()
}

/// Groups that a document's rules ask for by name.
pub fn groups(document: &PolicyDocument) -> BTreeSet<&str> {
    let selectors = document.rules().iter().flat_map(Rule::selectors);
    let named = selectors.filter_map(|selector| match selector {
        Selector::Group(group) => group.name(),
        _ => None,
    });
    named.collect()
}

/// As `unlearned`, without endpoints: a warning if the document has rules by name, and none of
/// `all` has a DNS rule for the same endpoints, as far as can be told without their labels.
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
    let rules = || all.iter().flat_map(|document| document.rules());
    let dns = || rules().filter(|rule| rule.egress.peers.iter().any(|rule| is_dns(rule)));
    let mut named = document.rules().iter().filter(by_name);
    let lacks = named.find(|rule| !dns().any(|other| may_share(rule, other)))?;
    let path = lacks.egress.peers.iter().find(|rule| is_by_name(rule))?;
    Some(format!(
        "{}: toFQDNs without any DNS rule: {LEARNS_NOTHING}",
        path.path
    ))
}

/// Labels that selectors ask for and that Pod documents do not give to identities: such a selector
/// selects no pod. `gives` says whether a label is part of an identity.
pub fn labels_of_no_identity(
    document: &PolicyDocument,
    gives: impl Fn(&Label) -> bool,
) -> Vec<String> {
    let rules = document.rules().iter();
    let selectors = rules.flat_map(|rule| {
        let peers = rule.selectors().filter_map(|selector| match selector {
            Selector::Labels(labels) => Some(labels),
            _ => None,
        });
        [&rule.subject].into_iter().chain(peers)
    });
    let wanted = selectors.flat_map(|selector| &selector.requirements);
    let keys = wanted.filter_map(|requirement| {
        let present = matches!(requirement.operator, Operator::In(_) | Operator::Exists);
        let source = requirement.source.as_deref().unwrap_or(K8S);
        let is_left_out = || !gives(&Label::new(K8S, &requirement.key, ""));
        (present && source == K8S && is_left_out()).then_some(requirement.key.as_str())
    });
    let keys: BTreeSet<&str> = keys.collect();
    let text = |key: &str| {
        format!(
            "a selector asks for the label {key}, which is not part of a pod's identity: it \
             selects no Pod document; select another label, or start the agent with \
             --labels that includes it"
        )
    };
    keys.into_iter().map(text).collect()
}
