//! The cluster as policy sees it: pods with their labels and addresses, Services with their
//! backends.
//!
//! ```text
//!  API server ─► watch (one for each kind) ─► documents ─┐
//!                                                        ├─► book (pods × namespaces, slices × services)
//!  --policy-dir ─► documents ────────────────────────────┘     └─► PodAt, ServiceAt
//!                                  labels: which of a pod's labels make its identity
//! ```

#[cfg(feature = "kubernetes")]
pub(crate) mod backoff;
#[cfg(feature = "kubernetes")]
pub mod client;
#[cfg(not(feature = "kubernetes"))]
#[path = "kubernetes/no_client.rs"]
pub mod client;
#[cfg(feature = "kubernetes")]
mod decode;
pub mod health;
#[cfg(feature = "kubernetes")]
pub(crate) mod lease;
#[cfg(feature = "kubernetes")]
pub(crate) mod lease_client;
pub(crate) mod listing_file;
pub(crate) mod listing_task;
#[cfg(feature = "kubernetes")]
mod own_node;
#[cfg(feature = "kubernetes")]
pub(crate) mod own_set;
#[cfg(not(feature = "kubernetes"))]
#[path = "kubernetes/no_own_set.rs"]
pub(crate) mod own_set;
pub(crate) mod refusals;
#[cfg(feature = "kubernetes")]
mod report;
pub(crate) mod resource;
#[cfg(feature = "kubernetes")]
#[cfg(test)]
pub(crate) mod scripted;
#[cfg(feature = "kubernetes")]
pub(crate) mod start;
#[cfg(feature = "kubernetes")]
pub(crate) mod startup_taint;
#[cfg(not(feature = "kubernetes"))]
#[path = "kubernetes/no_startup_taint.rs"]
pub(crate) mod startup_taint;
#[cfg(feature = "kubernetes")]
pub(crate) mod watch;

use std::{path::PathBuf, sync::Arc};

use agent_core::policy::source::cluster::Batch;
use tokio::sync::{mpsc, watch as channel};

use self::{health::ClusterHealth, refusals::Refusals};

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
pub(crate) struct Here {
    /// Name of this node.
    pub(crate) node: String,
    /// `--k8s-service-cidr` is given.
    pub(crate) has_service_blocks: bool,
}

/// Watches that run.
#[derive(Debug)]
pub(crate) struct Watches {
    /// What they see.
    pub(crate) batches: mpsc::Receiver<Batch>,
    /// How they are.
    pub(crate) health: ClusterHealth,
    /// Takes the refused objects, which are reported in the cluster.
    pub(crate) refusals: channel::Sender<Arc<Refusals>>,
}
