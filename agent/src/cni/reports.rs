//! What requests of the CNI plugin tell about the node, for metrics.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use daemon::metrics::Counts;

use super::failures::AddFailure;

/// Counts of the plugin's requests. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct PluginReports {
    /// Failed ADDs since the agent started.
    pub(crate) failures: Counts<AddFailure>,
    fail_open: Arc<AtomicUsize>,
}

impl PluginReports {
    /// Records how many namespaces start without the agent, by the plugin's configuration.
    pub(super) fn note_fail_open(&self, namespaces: usize) {
        self.fail_open.store(namespaces, Relaxed);
    }

    /// Number of namespaces that start without the agent, as of the last ADD.
    pub(crate) fn fail_open(&self) -> usize {
        self.fail_open.load(Relaxed)
    }
}
