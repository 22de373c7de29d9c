//! The rules that replace a refused EgressFirewall of which no good version is known.

use std::sync::Arc;

use super::{
    document::{Body, PolicyDocument, PolicyError},
    egress_firewall::{KIND, NAME},
    rule::{Direction, Rule, TierAction, TierRule},
    validate::pods_of_namespace,
};
use crate::{
    ipcache::resolve::whole_families,
    selector::selector::{CidrSelector, Selector},
};

/// A document that denies the pods of the namespace all that an EgressFirewall can deny. `None` if the
/// refused document is of another kind, or if it does not have the name of an EgressFirewall.
pub(crate) fn of_refused(error: &PolicyError) -> Option<PolicyDocument> {
    let key = error.key.as_ref()?;
    let namespace = key.strip_prefix(KIND)?.strip_prefix('/')?;
    let namespace = namespace.strip_suffix(NAME)?.strip_suffix('/')?;
    let tier = whole_families().into_iter().map(|prefix| {
        let nodes = true;
        let except = [].into();
        Arc::new(TierRule {
            path: "while it is refused".into(),
            action: TierAction::Deny,
            selectors: vec![Selector::Cidr(CidrSelector {
                prefix,
                except,
                nodes,
            })],
            ports: Vec::new(),
        })
    });
    let rule = Rule {
        subject: pods_of_namespace(namespace),
        egress: Direction::default(),
        ingress: Direction::default(),
        tier: tier.collect(),
    };
    let warning = format!(
        "is refused, and no good version of it is known: pods of namespace {namespace} reach no node and no \
         address outside until it is corrected or removed ({}: {}; {})",
        error.field, error.reason, error.remedy
    );
    Some(PolicyDocument {
        key: key.clone(),
        source: error.source_name.clone(),
        warnings: vec![warning],
        body: Body::Rules(vec![rule]),
    })
}
