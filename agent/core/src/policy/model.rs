//! The policy model: which peers may communicate, on which ports, by pods, blocks and names.
//!
//! It is a value of its own; policy map entries and DNS rules are renderings of it
//! ([`super::compute`]).

use std::{ops::Range, sync::Arc};

use super::{
    document::PolicyDocument,
    mode::PolicyMode,
    repository::Repository,
    rule::{Direction, PeerRule, Rule, TierRule},
};
use crate::{labels::LabelSet, selector::selector::Selector};

/// Policy of all endpoints with one label set.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct EndpointPolicy {
    pub egress: Side,
    pub ingress: Side,
    /// Keys of the documents that contributed, sorted.
    pub documents: Vec<String>,
    pub mode: PolicyMode,
}

/// One direction of an endpoint's policy.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Side {
    /// Whether what no rule allows is denied.
    pub enforced: bool,
    /// Documents that enforce the direction, sorted.
    pub enforcers: Vec<Arc<str>>,
    /// Ordered rules that are read before the others, by document and in the document's order: the
    /// first one that covers a packet decides. Only egress has any.
    pub tier: Vec<SideRule<TierRule>>,
    /// Rules in force, by document; a deny beats every allow.
    pub rules: Vec<SideRule>,
}

/// A rule in force, with its document.
#[derive(Clone, Debug, PartialEq)]
pub struct SideRule<R = PeerRule> {
    /// Key of the document that the rule is from.
    pub document: Arc<str>,
    pub rule: Arc<R>,
}

/// Rules that were added or removed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Change {
    /// Rules about what may be sent.
    pub egress: SideChange,
    /// Rules about what may be received.
    pub ingress: SideChange,
}

/// Rules of one direction that were added or removed.
#[derive(Clone, Debug, Default)]
pub(crate) struct SideChange {
    pub added: Vec<Arc<PeerRule>>,
    pub removed: Vec<Arc<PeerRule>>,
    /// Ordered rules that were added or removed, or that have another place in the order.
    pub tier: Vec<Arc<TierRule>>,
}

impl EndpointPolicy {
    /// Policy of endpoints with these labels.
    pub(crate) fn of(labels: &LabelSet, repository: &Repository) -> Self {
        let mode = repository.mode_of(labels);
        let mut policy = Self {
            mode,
            ..Self::default()
        };
        policy.egress.enforced = mode.enforces(false);
        policy.ingress.enforced = mode.enforces(false);
        for document in repository.iter() {
            policy.put(&document.key, labels, Some(document));
        }
        policy
    }

    /// Replaces the former version of a document; `None` removes the document.
    pub(crate) fn put(
        &mut self,
        key: &str,
        labels: &LabelSet,
        document: Option<&PolicyDocument>,
    ) -> Change {
        let document = document.filter(|_| self.mode != PolicyMode::Never);
        let rules = document.into_iter().flat_map(|document| document.rules());
        let rules: Vec<&Rule> = rules.filter(|rule| rule.subject.matches(labels)).collect();
        let at = self.documents.partition_point(|known| known.as_str() < key);
        let known = self.documents.get(at).is_some_and(|known| known == key);
        match (known, rules.is_empty()) {
            (true, true) => drop(self.documents.remove(at)),
            (false, false) => self.documents.insert(at, key.to_owned()),
            (true, false) => {}
            (false, true) => return Change::default(),
        }
        let key: Arc<str> = key.into();
        let egress = rules.iter().map(|rule| &rule.egress);
        let ingress = rules.iter().map(|rule| &rule.ingress);
        let mut change = Change {
            egress: self.egress.put(self.mode, &key, egress),
            ingress: self.ingress.put(self.mode, &key, ingress),
        };
        let tier: Vec<&Arc<TierRule>> = rules.iter().flat_map(|rule| &rule.tier).collect();
        let (added, removed) = replace(&mut self.egress.tier, &key, &tier);
        change.egress.tier = [added, removed].concat();
        change
    }
}

impl Side {
    fn put<'a>(
        &mut self,
        mode: PolicyMode,
        document: &Arc<str>,
        new: impl Iterator<Item = &'a Direction> + Clone,
    ) -> SideChange {
        let enforces = new.clone().any(|direction| direction.default_deny);
        let at = self.enforcers.partition_point(|known| known < document);
        match (self.enforcers.get(at) == Some(document), enforces) {
            (true, false) => drop(self.enforcers.remove(at)),
            (false, true) => self.enforcers.insert(at, Arc::clone(document)),
            _ => {}
        }
        self.enforced = mode.enforces(!self.enforcers.is_empty());
        let new: Vec<&Arc<PeerRule>> = new.flat_map(|direction| &direction.peers).collect();
        let (added, removed) = replace(&mut self.rules, document, &new);
        SideChange {
            added,
            removed,
            tier: Vec::new(),
        }
    }
}

/// Rules that were added, and rules that were removed.
type Replaced<R> = (Vec<Arc<R>>, Vec<Arc<R>>);

/// Replaces a document's former rules by those of its new version.
fn replace<R: PartialEq>(
    rules: &mut Vec<SideRule<R>>,
    document: &Arc<str>,
    new: &[&Arc<R>],
) -> Replaced<R> {
    let (old, new) = differing(rules, document, new);
    let added: Vec<Arc<R>> = new.iter().map(|rule| Arc::clone(rule)).collect();
    let removed = rules.splice(
        old,
        added.iter().map(|rule| SideRule {
            document: Arc::clone(document),
            rule: Arc::clone(rule),
        }),
    );
    let removed = removed.map(|rule| rule.rule).collect();
    (added, removed)
}

/// The positions of a document's rules, and its new version. Both are without the rules with
/// which the two versions begin and end alike.
fn differing<'r, 'a, R: PartialEq>(
    rules: &[SideRule<R>],
    document: &Arc<str>,
    mut new: &'r [&'a Arc<R>],
) -> (Range<usize>, &'r [&'a Arc<R>]) {
    let mut first = rules.partition_point(|rule| rule.document < *document);
    let mut end = rules.partition_point(|rule| rule.document <= *document);
    while let (Some(old), Some((next, rest))) = (rules.get(first..end), new.split_first())
        && old.first().is_some_and(|old| old.rule == **next)
    {
        first += 1;
        new = rest;
    }
    while let (Some(old), Some((last, rest))) = (rules.get(first..end), new.split_last())
        && old.last().is_some_and(|old| old.rule == **last)
    {
        end -= 1;
        new = rest;
    }
    (first..end, new)
}

impl Change {
    /// Selectors of every rule that was added or removed.
    pub(crate) fn selectors(&self) -> impl Iterator<Item = &Selector> {
        let sides = [&self.egress, &self.ingress];
        let rules = sides
            .into_iter()
            .flat_map(|side| side.added.iter().chain(&side.removed));
        let tier = self.egress.tier.iter().flat_map(|rule| &rule.selectors);
        rules.flat_map(|rule| rule.selectors()).chain(tier)
    }
}
