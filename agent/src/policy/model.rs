//! The policy model: who may talk to whom, on what, by pods, blocks and names.
//!
//! A value of its own; policy map entries and DNS rules are renderings of it
//! ([`super::compute`]).

use std::sync::Arc;

use super::{
    repository::Repository,
    rule::{Direction, PeerRule, Rule},
};
use crate::labels::LabelSet;

/// Policy of all endpoints with one label set.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EndpointPolicy {
    /// What they may send.
    pub egress: Side,
    /// What they may receive.
    pub ingress: Side,
    /// Documents that had a say.
    pub documents: Vec<String>,
}

/// One direction.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Side {
    /// What no rule allows is denied.
    pub enforced: bool,
    /// Rules in force; a deny beats every allow.
    pub rules: Vec<SideRule>,
}

/// A rule in force.
#[derive(Clone, Debug, PartialEq)]
pub struct SideRule {
    /// Document it comes from.
    pub document: Arc<str>,
    /// What it says.
    pub rule: PeerRule,
}

impl EndpointPolicy {
    /// Policy of endpoints with these labels.
    pub fn of(labels: &LabelSet, repository: &Repository) -> Self {
        let mut policy = Self::default();
        for document in repository.iter() {
            let key: Arc<str> = document.key.as_str().into();
            let mut has_say = false;
            for rule in document
                .rules
                .iter()
                .filter(|rule| rule.subject.matches(labels))
            {
                policy.add(rule, &key);
                has_say = true;
            }
            if has_say {
                policy.documents.push(document.key.clone());
            }
        }
        policy
    }

    fn add(&mut self, rule: &Rule, document: &Arc<str>) {
        self.egress.add(&rule.egress, document);
        self.ingress.add(&rule.ingress, document);
    }
}

impl Side {
    fn add(&mut self, direction: &Direction, document: &Arc<str>) {
        self.enforced |= direction.default_deny;
        self.rules
            .extend(direction.peers.iter().map(|rule| SideRule {
                document: Arc::clone(document),
                rule: rule.clone(),
            }));
    }
}
