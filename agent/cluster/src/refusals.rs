//! Refused objects of the cluster, for the reports in the cluster.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use agent_core::policy::document::PolicyError;

/// Maximum number of refused objects that are reported.
const REPORTED: usize = 500;

/// The objects of the cluster that are refused now, and the policies whose status changes if they are
/// accepted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Refusals {
    /// Why each document is refused, by its key.
    pub(crate) refused: BTreeMap<String, Arc<str>>,
    /// Keys of policies whose status has to be written if they are accepted: the status has our
    /// report of a refusal, or no report yet.
    pub(crate) marked: BTreeSet<String>,
}

impl Refusals {
    /// Keeps the first `REPORTED` refused objects, and as many marked ones.
    pub fn of<'a>(
        refused: impl Iterator<Item = &'a PolicyError>,
        marked: impl Iterator<Item = &'a String>,
    ) -> Self {
        let refused = refused.filter_map(|error| {
            let message = format!("{}: {}; {}", error.field, error.reason, error.remedy);
            Some((error.key.clone()?, Arc::from(message)))
        });
        Self {
            refused: refused.take(REPORTED).collect(),
            marked: marked.take(REPORTED).cloned().collect(),
        }
    }

    /// Whether there is nothing to write.
    pub(crate) fn is_empty(&self) -> bool {
        self.refused.is_empty() && self.marked.is_empty()
    }
}
