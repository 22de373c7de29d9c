//! The data of `status` and the metrics about the CiliumIdentities that this agent makes.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use daemon::{label, metrics::Counts};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// The present state of the agent's work on CiliumIdentity objects: problems, label sets that wait, and whether this
/// agent leads.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct IdentitiesView {
    /// Why no object is made, or why the last one could not be made; `None` = nothing is in the way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Why this agent neither deletes unused objects nor makes those of nodes without an agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lead_problem: Option<String>,
    /// The first label set that lacks an object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lacking: Option<String>,
    /// Namespaces whose label sets change so often that their objects wait.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub limited: Vec<String>,
    /// Whether this agent deletes unused objects.
    pub leads: bool,
    /// Objects in use that were deleted since the start.
    pub vanished: u64,
}

label! {
    /// How an attempt to make a CiliumIdentity ended.
    Outcome = "outcome" {
        /// The agent made the object.
        Created => "created",
        /// Another agent had created the object for the same labels first.
        Found => "found",
        /// All numbers that the label set may get belong to other label sets.
        Full => "full",
        /// The API server refused the object, or did not answer.
        Failed => "failed",
    }
}

/// Shared by the tasks that make objects, `status` and the metrics.
#[derive(Clone, Debug, Default)]
pub struct Identities {
    view: Arc<Mutex<IdentitiesView>>,
    creates: Arc<Counts<Outcome>>,
    deletes: Arc<AtomicU64>,
}

impl Identities {
    /// The state after the last change that the task reported.
    pub fn view(&self) -> IdentitiesView {
        self.view.lock().clone()
    }

    /// Attempts to make objects, by outcome.
    pub fn creates(&self) -> &Counts<Outcome> {
        &self.creates
    }

    /// Unused objects that this agent deleted.
    pub fn deletes(&self) -> u64 {
        self.deletes.load(Ordering::Relaxed)
    }

    #[cfg(feature = "kubernetes")]
    pub(super) fn deleted(&self) {
        self.deletes.fetch_add(1, Ordering::Relaxed);
    }

    #[cfg(feature = "kubernetes")]
    pub(super) fn change(&self, change: impl FnOnce(&mut IdentitiesView)) {
        change(&mut self.view.lock());
    }
}
