//! The cluster: objects of its API server, read by watches or from relays, and what the agent writes
//! into it.
//!
//! ```text
//!  API server ─► watch (one for each kind) ─► batches of documents ─► the agent
//!      ▲            └─► relay ══ gRPC, TLS ══► relay::follow ─┘  └─► listing_file, for the next start
//!      └── report (refused objects), own_node, startup_taint
//! ```

#[cfg(feature = "kubernetes")]
pub mod backoff;
#[cfg(feature = "kubernetes")]
pub mod client;
#[cfg(not(feature = "kubernetes"))]
#[path = "no_client.rs"]
pub mod client;
#[cfg(feature = "kubernetes")]
mod decode;
pub mod health;
#[cfg(feature = "kubernetes")]
pub mod lease;
#[cfg(feature = "kubernetes")]
pub mod lease_client;
pub mod listing_file;
pub mod listing_task;
pub mod own_interfaces;
#[cfg(feature = "kubernetes")]
mod own_node;
#[cfg(feature = "kubernetes")]
pub mod own_set;
#[cfg(not(feature = "kubernetes"))]
#[path = "no_own_set.rs"]
pub mod own_set;
pub mod refusals;
pub mod relay;
#[cfg(feature = "kubernetes")]
mod report;
pub mod resource;
#[cfg(any(test, feature = "scripted"))]
#[cfg(feature = "kubernetes")]
pub mod scripted;
#[cfg(feature = "kubernetes")]
pub mod start;
#[cfg(feature = "kubernetes")]
pub mod startup_taint;
#[cfg(not(feature = "kubernetes"))]
#[path = "no_startup_taint.rs"]
pub mod startup_taint;
#[cfg(feature = "kubernetes")]
pub(crate) mod watch;

use std::{path::PathBuf, sync::Arc};

use agent_core::policy::source::cluster::Batch;
use tokio::sync::{mpsc, watch as channel};

use crate::{health::ClusterHealth, refusals::Refusals};

/// Where the API server is, and with which account it is asked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ApiSettings {
    /// Kubeconfig; none = the service account of this pod.
    pub kubeconfig: Option<PathBuf>,
    /// URL of the server, in the place of the kubeconfig's or the environment's.
    pub server: Option<String>,
}

/// What the watches have to know of this node.
#[derive(Clone, Debug)]
pub struct Here {
    /// Name of this node.
    pub node: String,
    /// `--k8s-service-cidr` is given.
    pub has_service_blocks: bool,
}

/// Watches that run.
#[derive(Debug)]
pub struct Watches {
    /// What they see.
    pub batches: mpsc::Receiver<Batch>,
    /// How they are.
    pub health: ClusterHealth,
    /// Takes the refused objects, which are reported in the cluster.
    pub refusals: channel::Sender<Arc<Refusals>>,
}
