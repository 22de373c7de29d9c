//! Measures, for the log, how long a start takes until the objects in the first listings of all sources are in force.

use std::time::Instant;

use agent_core::core::Core;

#[derive(Debug)]
pub(super) struct Start {
    begun: Instant,
    is_synced: bool,
}

impl Default for Start {
    fn default() -> Self {
        Self {
            begun: Instant::now(),
            is_synced: false,
        }
    }
}

impl Start {
    /// Logs once that the objects in the first listings of all sources are in force.
    pub(super) fn note_synced(&mut self, core: &Core) {
        if !self.is_synced && core.is_synced() {
            self.is_synced = true;
            let after = self.begun.elapsed();
            tracing::info!(?after, "the node is as the sources say");
        }
    }
}
