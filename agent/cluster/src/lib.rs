//! The cluster: objects of its API server, read by watches or from relays, and what the agent writes
//! into it.
//!
//! ```text
//!  API server ─► watch (one for each kind) ─► batches of documents ─► the agent
//!      ▲            └─► relay ══ gRPC, TLS ══► relay::follow ─┘  └─► listing_file, for the next start
//!      └── report (refused objects), own_node, startup_taint
//! ```

#![cfg_attr(
    not(feature = "kubernetes"),
    allow(dead_code, reason = "what only the client uses")
)]

#[cfg(feature = "kubernetes")]
pub mod api;
pub mod health;
pub mod listing_file;
pub mod listing_task;
#[cfg(not(feature = "kubernetes"))]
mod no_client;
pub mod own_interfaces;
pub mod refusals;
#[cfg(feature = "kubernetes")]
pub mod relay;
pub mod relay_refusal;
pub mod relay_settings;
pub mod resource;

#[cfg(not(feature = "kubernetes"))]
pub use self::no_client::{api, relay};

use std::{path::PathBuf, sync::Arc};

use agent_core::{high_scale::scope::PodScope, policy::source::cluster::Batch};
use tokio::sync::{mpsc, watch as channel};

use crate::{health::ClusterHealth, refusals::Refusals, resource::Resource};

/// Where the API server is, and with which account it is asked.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args)]
#[allow(rustdoc::bare_urls, reason = "texts of --help")]
pub struct ApiSettings {
    /// Kubeconfig with the address of the API server and the account to use there; its current
    /// context counts. Without it: the service account of this pod
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// URL of the API server, for example https://192.0.2.1:6443, in the place of the kubeconfig's
    /// or of KUBERNETES_SERVICE_HOST: an address that does not depend on kube-proxy
    #[arg(id = "k8s_api_server", long = "k8s-api-server", value_name = "URL")]
    pub server: Option<String>,
}

/// What the watches have to know of this node.
#[derive(Clone, Debug)]
pub struct Here {
    pub node: String,
    /// Part of the node in the tunnel between nodes, which its CiliumNode names.
    pub high_scale: Option<&'static str>,
    /// Kinds that are watched.
    pub resources: &'static [Resource],
    /// Whether the agent writes nothing in the cluster: neither the object about this node nor reports.
    pub reads_only: bool,
    /// `--k8s-service-cidr` is given, or `--without-service-cidrs` to a relay: the kind ServiceCIDR
    /// may then be absent.
    pub has_service_blocks: bool,
    /// Pods that this node reads.
    pub pods: PodScope,
}

/// The watches of this run, as the agent follows them.
#[derive(Debug)]
pub struct Watches {
    /// New, changed and deleted documents.
    pub batches: mpsc::Receiver<Batch>,
    /// Whether each watch is current, for `status` and metrics.
    pub health: ClusterHealth,
    /// Takes the refused objects, which are reported in the cluster.
    pub refusals: channel::Sender<Arc<Refusals>>,
}
