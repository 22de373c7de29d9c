//! Which identities names have, and which addresses the circuit breaker limits.
//!
//! Owns the identities with a label of a name, the count of combinations among them, and the
//! prefixes that got the labels of only some of their names. It keeps one invariant: a limited
//! prefix is tried again after each change of the identities of names.

use std::collections::{BTreeSet, VecDeque};

use ipnet::IpNet;
use shared_maps::IdentityId;

use crate::labels::{DNS_NAME, FQDN, Label, LabelSet};

/// Maximum number of prefixes in one retry: each is compared with many identities of names.
const RETRIED: usize = 512;

/// The identities that have labels of names, and how many of them are combinations.
#[derive(Debug, Default)]
pub(crate) struct IdentityBudget {
    identities: BTreeSet<IdentityId>,
    /// How many of `identities` have labels of several selectors of names.
    combinations: usize,
    /// During the sync: label sets of combinations that will get an identity.
    awaited: BTreeSet<LabelSet>,
    /// How often an identity was added or removed.
    changes: u64,
    /// Prefixes that have the labels of only some of their names.
    limited: BTreeSet<IpNet>,
    /// Prefixes of `limited` that are still to be tried again.
    queue: VecDeque<IpNet>,
    /// The value of `changes` when the queue was last filled.
    queued_at: u64,
}

pub(crate) fn is_name(label: &&Label) -> bool {
    matches!(label.source(), FQDN | DNS_NAME)
}

/// Whether answers made the label set: it has the labels of several names' selectors.
pub(crate) fn is_combination(labels: &LabelSet) -> bool {
    labels.iter().filter(is_name).nth(1).is_some()
}

impl IdentityBudget {
    /// Counts an identity that was allocated. An identity without a label of a name is ignored.
    pub(crate) fn add(&mut self, identity: IdentityId, labels: &LabelSet) {
        if !labels.iter().any(|label| is_name(&label)) {
            return;
        }
        if self.identities.insert(identity) {
            self.changes += 1;
            self.combinations += usize::from(is_combination(labels));
        }
        self.awaited.remove(labels);
    }

    /// Stops counting an identity that was released.
    pub(crate) fn remove(&mut self, identity: IdentityId, labels: &LabelSet) {
        if self.identities.remove(&identity) {
            self.changes += 1;
            self.combinations -= usize::from(is_combination(labels));
        }
    }

    /// Notes label sets that will have an identity once everything is resolved.
    pub(crate) fn expect(&mut self, awaited: BTreeSet<LabelSet>) {
        self.awaited = awaited;
    }

    /// Ends the wait for these label sets, because every prefix is resolved.
    pub(crate) fn end_expecting(&mut self) {
        self.awaited.clear();
    }

    /// Whether `max` combinations have an identity, or will have one.
    pub(crate) fn is_used_up(&self, max: usize) -> bool {
        self.combinations + self.awaited.len() >= max
    }

    /// How many identities have a label of a name.
    pub(crate) fn len(&self) -> usize {
        self.identities.len()
    }

    /// How many identities have labels of several selectors of names.
    pub(crate) fn combinations(&self) -> usize {
        self.combinations
    }

    /// Identities of names, the highest number first.
    pub(crate) fn latest(&self) -> impl Iterator<Item = IdentityId> {
        self.identities.iter().rev().copied()
    }

    /// Notes that a prefix has the labels of only some of its names. True if it had the labels of all of them before.
    pub(crate) fn limit(&mut self, prefix: IpNet) -> bool {
        self.limited.insert(prefix)
    }

    /// Notes that a prefix has the labels of all its names.
    pub(crate) fn unlimit(&mut self, prefix: IpNet) {
        self.limited.remove(&prefix);
    }

    /// Whether a prefix has the labels of only some of its names.
    pub(crate) fn is_limited(&self, prefix: IpNet) -> bool {
        self.limited.contains(&prefix)
    }

    /// How many prefixes have the labels of only some of their names.
    pub(crate) fn limited(&self) -> usize {
        self.limited.len()
    }

    /// Takes some limited prefixes that are to be tried again. Once an identity was added or removed,
    /// all limited prefixes take their turn.
    pub(crate) fn take_retries(&mut self) -> Vec<IpNet> {
        if self.queue.is_empty() && self.queued_at != self.changes {
            self.queued_at = self.changes;
            self.queue.extend(&self.limited);
        }
        let some = self.queue.len().min(RETRIED);
        let limited = &self.limited;
        let some = self.queue.drain(..some);
        some.filter(|prefix| limited.contains(prefix)).collect()
    }
}
