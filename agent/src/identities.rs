//! CiliumIdentity objects: this agent makes those that the label sets of its pods lack, and one agent of the
//! cluster looks after all of them.
//!
//! ```text
//!  core ── WantedIdentities ─► feed ─► task ── create, get ──► API server
//!   ▲ ▲                                │ ▲                        │
//!   │ └──────── NumbersGiven ──────────┘ └── leader ── delete ────┤  (holds the Lease)
//!   └── watch, relay or stored list ◄─────────────────────────────┘
//! ```

#[cfg(feature = "kubernetes")]
mod leader;
#[cfg(feature = "kubernetes")]
mod objects;
#[cfg(feature = "kubernetes")]
mod operator;
#[cfg(feature = "kubernetes")]
mod queue;
#[cfg(feature = "kubernetes")]
pub(crate) mod task;
#[cfg(feature = "kubernetes")]
mod unused;
pub mod view;

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
