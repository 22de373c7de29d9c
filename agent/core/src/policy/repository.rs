//! The documents in force.

use std::{collections::BTreeMap, sync::Arc};

use super::{document::PolicyDocument, mode::PolicyMode};
use crate::labels::LabelSet;

/// Documents by key, and the mode of endpoints that have none of their own.
#[derive(Clone, Debug, Default)]
pub struct Repository {
    documents: BTreeMap<String, Arc<PolicyDocument>>,
    mode: PolicyMode,
}

impl Repository {
    /// A repository without documents. `mode` is the mode of endpoints that have none of their own.
    pub fn new(mode: PolicyMode) -> Self {
        Self {
            documents: BTreeMap::new(),
            mode,
        }
    }

    /// The policy mode of endpoints with these labels.
    pub fn mode_of(&self, labels: &LabelSet) -> PolicyMode {
        PolicyMode::of(labels).unwrap_or(self.mode)
    }

    /// Puts a document in force; gives the one it replaces.
    pub fn insert(&mut self, document: Arc<PolicyDocument>) -> Option<Arc<PolicyDocument>> {
        self.documents.insert(document.key.clone(), document)
    }

    /// Takes a document out of force.
    pub fn remove(&mut self, key: &str) -> Option<Arc<PolicyDocument>> {
        self.documents.remove(key)
    }

    pub fn get(&self, key: &str) -> Option<&Arc<PolicyDocument>> {
        self.documents.get(key)
    }

    /// All documents in the order of their keys.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<PolicyDocument>> {
        self.documents.values()
    }

    pub fn len(&self) -> usize {
        self.documents.len()
    }

    pub fn is_empty(&self) -> bool {
        self.documents.is_empty()
    }
}

/// Whether a document is about an endpoint with these labels.
pub(crate) fn is_about(document: &PolicyDocument, labels: &LabelSet) -> bool {
    document
        .rules()
        .iter()
        .any(|rule| rule.subject.matches(labels))
}
