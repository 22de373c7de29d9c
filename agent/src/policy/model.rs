//! The policy model: which peers may communicate, on which ports, by pods, blocks and names.
//!
//! A value of its own; policy map entries and DNS rules are renderings of it
//! ([`super::compute`]).

use std::{ops::Range, sync::Arc};

use super::{
    document::PolicyDocument,
    mode::PolicyMode,
    repository::Repository,
    rule::{Direction, PeerRule, Rule},
};
use crate::labels::LabelSet;

/// Policy of all endpoints with one label set.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct EndpointPolicy {
    /// What they may send.
    pub egress: Side,
    /// What they may receive.
    pub ingress: Side,
    /// Documents that had a say, sorted.
    pub documents: Vec<String>,
    /// When it is enforced.
    pub mode: PolicyMode,
}

/// One direction.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Side {
    /// What no rule allows is denied.
    pub enforced: bool,
    /// Documents that say so, sorted.
    pub enforcers: Vec<Arc<str>>,
    /// Rules in force, by document; a deny beats every allow.
    pub rules: Vec<SideRule>,
}

/// A rule in force.
#[derive(Clone, Debug, PartialEq)]
pub struct SideRule {
    /// Document it comes from.
    pub document: Arc<str>,
    /// What it says.
    pub rule: Arc<PeerRule>,
}

/// Rules that came and went.
#[derive(Clone, Debug, Default)]
pub(crate) struct Change {
    /// New in what may be sent.
    pub egress: SideChange,
    /// New in what may be received.
    pub ingress: SideChange,
}

/// Rules of one direction that came and went.
#[derive(Clone, Debug, Default)]
pub(crate) struct SideChange {
    /// Not there before.
    pub added: Vec<Arc<PeerRule>>,
    /// Not there any more.
    pub removed: Vec<Arc<PeerRule>>,
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

    /// Puts a version of a document in the place of the one before; none = it is gone.
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
        Change {
            egress: self.egress.put(self.mode, &key, egress),
            ingress: self.ingress.put(self.mode, &key, ingress),
        }
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
        let (old, new) = self.differing(document, &new);
        let added: Vec<Arc<PeerRule>> = new.iter().map(|rule| Arc::clone(rule)).collect();
        let removed = self.rules.splice(
            old,
            added.iter().map(|rule| SideRule {
                document: Arc::clone(document),
                rule: Arc::clone(rule),
            }),
        );
        let removed = removed.map(|rule| rule.rule).collect();
        SideChange { added, removed }
    }

    /// The positions of a document's rules, and its new version. Both are without the rules with
    /// which the two versions begin and end alike.
    fn differing<'r, 'a>(
        &self,
        document: &Arc<str>,
        mut new: &'r [&'a Arc<PeerRule>],
    ) -> (Range<usize>, &'r [&'a Arc<PeerRule>]) {
        let mut first = self.rules.partition_point(|rule| rule.document < *document);
        let mut end = self
            .rules
            .partition_point(|rule| rule.document <= *document);
        while let (Some(old), Some((next, rest))) = (self.rules.get(first..end), new.split_first())
            && old.first().is_some_and(|old| old.rule == **next)
        {
            first += 1;
            new = rest;
        }
        while let (Some(old), Some((last, rest))) = (self.rules.get(first..end), new.split_last())
            && old.last().is_some_and(|old| old.rule == **last)
        {
            end -= 1;
            new = rest;
        }
        (first..end, new)
    }
}

impl Change {
    /// Every rule that came or went.
    pub(crate) fn rules(&self) -> impl Iterator<Item = &Arc<PeerRule>> {
        let sides = [&self.egress, &self.ingress];
        sides
            .into_iter()
            .flat_map(|side| side.added.iter().chain(&side.removed))
    }
}
