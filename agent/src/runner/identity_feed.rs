//! Label sets that lack a CiliumIdentity, on their way from the core to the task that makes these objects.

use std::sync::Arc;

use agent_core::identity::cluster::WantedIdentities;
use tokio::sync::watch;

/// From the core to the task: label sets that lack an object. The core never waits here.
#[derive(Clone, Debug, Default)]
pub struct IdentityFeed {
    wanted: watch::Sender<Arc<WantedIdentities>>,
}

impl IdentityFeed {
    /// Receives the list after each change.
    pub fn wanted(&self) -> watch::Receiver<Arc<WantedIdentities>> {
        self.wanted.subscribe()
    }

    pub(crate) fn publish(&self, wanted: Arc<WantedIdentities>) {
        self.wanted.send_replace(wanted);
    }
}
