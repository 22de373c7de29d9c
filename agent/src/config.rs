//! What the agent was asked to do: its settings, from flags and environment that are checked once.

pub mod args;
mod cluster_args;
pub mod cluster_command;
mod cni_args;
mod deny_args;
mod destination;
mod dir;
mod firewall_args;
mod from_args;
mod host_name;
mod max_identities;
mod metrics_address;
mod relay_args;
mod resolver_args;
mod run_args;
pub mod why_args;

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use agent_cluster::{ApiSettings, relay_settings::RelaySettings};
use agent_core::{core::CoreConfig, kubernetes::labels::LabelRule};
use agent_datapath::{deny_response::DenyResponses, kernel::MapSizes};
use dns_policy::reject_code::RejectCode;

pub use args::{Cli, ClientArgs, Command};
pub use cluster_args::{ClusterArgs, ServiceAlias};
pub use cni_args::CniArgs;
pub use deny_args::DenyArgs;
pub use dir::{ParseError, Parsed, parse};
pub use firewall_args::FirewallArgs;
pub use max_identities::MaxIdentities;
pub use relay_args::{FollowArgs, RelayArgs};
pub use resolver_args::{ResolverArgs, ResolverMode};
pub use run_args::RunArgs;

use crate::{cni::install::CniPlaces, resolver::ResolverSettings};

/// A value that cannot be used. Exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("--{flag}: {reason}")]
pub struct ConfigError {
    /// Name of the flag, without the leading dashes.
    pub flag: &'static str,
    /// What is wrong and what to write instead.
    pub reason: String,
}

/// Checked settings of `holdfast-agent run`.
#[derive(Clone, Debug)]
pub struct Config {
    /// What the core decides by. Boot and start are those of the run, which adds them.
    pub core: CoreConfig,
    /// Root of the BPF file system, or a directory in it.
    pub bpf_root: PathBuf,
    /// Directory of the lock, the epoch and `state/`.
    pub state_dir: PathBuf,
    pub policy_dir: Option<PathBuf>,
    /// The API server that the cluster is read from.
    pub kubernetes: Option<ApiSettings>,
    /// Relays that the objects of the cluster are read from, in the place of the API server.
    pub relays: Option<RelaySettings>,
    /// Where names of EgressFirewalls are refreshed and shared; `None` = nowhere.
    pub resolver: Option<ResolverSettings>,
    /// The DaemonSet of this agent; when it is gone at the end, the node is cleaned up.
    pub daemonset: Option<String>,
    /// Name of this node; the host name if `--node-name` is absent.
    pub node_name: String,
    /// Key of the taint that is removed from the Node once the agent is ready; `None` = no taint.
    pub startup_taint: Option<String>,
    /// Name of this node's cluster.
    pub cluster_name: String,
    /// Which labels make a pod's identity, beside the usual rules.
    pub label_rules: Vec<LabelRule>,
    /// Blocks of Services are given.
    pub has_service_blocks: bool,
    pub endpoint_dir: Option<PathBuf>,
    /// Directory of the endpoints that commands added, which a boot does not empty.
    pub endpoint_store: PathBuf,
    /// Socket of the native gRPC service.
    pub sdp_socket: PathBuf,
    /// Group that may connect to it beside root.
    pub sdp_group: u32,
    /// Socket of the admin interface.
    pub admin_socket: PathBuf,
    /// Socket of the CNI plugin; `None` = off.
    pub cni_socket: Option<PathBuf>,
    /// Where the CNI plugin and its configuration go; `None` = nowhere.
    pub cni_places: Option<CniPlaces>,
    /// Where pods that run without an endpoint are found; `None` = nowhere.
    pub netns_dir: Option<PathBuf>,
    /// Address of metrics and health; `None` = off.
    pub metrics_address: Option<SocketAddr>,
    /// No DNS proxy in this process.
    pub disable_builtin_dns_proxy: bool,
    /// Port of FQDNData on 127.0.0.1; `None` = off.
    pub fqdndata_port: Option<u16>,
    /// File of names that are known before anybody asks.
    pub pre_cache: Option<PathBuf>,
    /// Longest that an answer is held until its addresses are plumbed.
    pub response_max_delay: Duration,
    /// Code for names that are not allowed.
    pub reject_code: RejectCode,
    /// Proxies ask servers under pods' addresses.
    pub transparent: bool,
    /// Whether programs are attached by TCX links where the kernel has them.
    pub tcx: bool,
    /// Those outside of the cluster, too (the built-in proxy).
    pub transparent_outside: bool,
    /// Keep the proxy port bound while no proxy runs.
    pub hold_proxy_port: bool,
    /// Sizes of maps that are not there yet.
    pub map_sizes: MapSizes,
    /// Datagrams and new connections per second that each endpoint may send to the DNS proxy;
    /// 0 = any number.
    pub dns_quota: u32,
    /// Replies to packets that egress policy denies.
    pub deny_responses: DenyResponses,
    /// Between two looks into the conntrack maps.
    pub conntrack_gc_interval: Duration,
}

impl Config {
    /// Directory of the per-endpoint directories and checkpoints.
    pub fn state(&self) -> PathBuf {
        self.state_dir.join("state")
    }
}
