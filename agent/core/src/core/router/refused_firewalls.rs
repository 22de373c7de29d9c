//! EgressFirewalls that are refused and have no good version: each closes its namespace.
//!
//! If no version of the document were in force, the pods of the namespace would be open although its author restricts
//! them. Only a refused EgressFirewall closes pods: its key shows which pods it is about, whatever is wrong in it, and
//! it can open nothing. In a refused CiliumNetworkPolicy, the part that names the pods may be the wrong one.

use std::collections::BTreeMap;

use crate::policy::{
    closed_namespace,
    document::{PolicyDocument, PolicyError},
};

/// Documents that stand in for refused firewalls, by key.
type Closed = BTreeMap<String, PolicyDocument>;

/// The refused firewalls, and which of them the core has a document for.
#[derive(Debug, Default)]
pub(super) struct RefusedFirewalls {
    /// Every refused firewall, even if a good version of it is in force.
    refused: Closed,
    /// Refused firewalls that the core has a document for.
    closed: Closed,
    /// Whether every source was listed: a good version that is unknown then does not exist.
    is_listed: bool,
}

/// What the core has to change.
#[derive(Debug, Default)]
pub(super) struct Difference {
    pub(super) apply: Vec<PolicyDocument>,
    pub(super) delete: Vec<String>,
}

impl RefusedFirewalls {
    /// Takes all documents that are refused now.
    pub(super) fn set(&mut self, errors: &[PolicyError]) {
        let closed = errors.iter().filter_map(closed_namespace::of_refused);
        self.refused = closed
            .map(|document| (document.key.clone(), document))
            .collect();
    }

    /// Notes that the sources were listed.
    pub(super) fn set_listed(&mut self) {
        self.is_listed = true;
    }

    /// Notes that a good version of this document is in force.
    pub(super) fn put(&mut self, key: &str) {
        self.closed.remove(key);
    }

    /// The good version of this document is gone. Returns its replacement, if the document is refused.
    pub(super) fn replace(&mut self, key: &str) -> Option<PolicyDocument> {
        let document = self.refused.get(key)?;
        self.closed.insert(key.to_owned(), document.clone());
        Some(document.clone())
    }

    /// Closes the namespace of each refused firewall without a good version in force. Opens the
    /// namespaces of the others.
    pub(super) fn follow(&mut self, is_in_force: impl Fn(&str) -> bool) -> Difference {
        if !self.is_listed {
            return Difference::default();
        }
        let mut wanted = self.refused.clone();
        wanted.retain(|key, _| !is_in_force(key));
        let before = std::mem::replace(&mut self.closed, wanted);
        let changed = self.closed.iter();
        let changed = changed.filter(|(key, document)| before.get(*key) != Some(*document));
        let gone = before.keys().filter(|key| !self.refused.contains_key(*key));
        Difference {
            apply: changed.map(|(_, document)| document.clone()).collect(),
            delete: gone.cloned().collect(),
        }
    }
}
