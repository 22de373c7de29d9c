//! The agent's settings, from flags and environment, which are checked once.

mod allocation_args;
pub mod args;
mod cluster_args;
pub mod cluster_command;
mod cni_args;
pub mod container_args;
mod destination;
mod dir;
mod existing_dir;
mod firewall_args;
mod from_args;
mod high_scale_args;
mod host_name;
pub mod identity_args;
mod max_identities;
pub mod netpol_args;
pub mod observe_args;
#[cfg(test)]
mod parsed;
mod relay_args;
pub mod render_args;
mod resolver_args;
mod run_args;
mod settings;
mod source_args;
mod standby_args;
pub mod why_args;

use std::path::PathBuf;

use agent_cluster::{ApiSettings, relay_settings::RelaySettings};
use agent_core::core::CoreConfig;
use agent_datapath::{kernel::KernelConfig, tunnel::TunnelSettings};
use daemon::command_line::metrics_address::MetricsAddress;

pub use allocation_args::{AllocationArgs, IdentityAllocation};
pub use args::{Cli, ClientArgs, Command};
pub use cluster_args::ClusterArgs;
pub use cni_args::{CniArgs, PluginArgs};
pub use container_args::ContainerArgs;
pub use dir::{ParseError, Parsed, command, parse};
pub use firewall_args::FirewallArgs;
pub use high_scale_args::{HighScaleArgs, HighScaleMode};
pub use max_identities::MaxIdentities;
pub use netpol_args::NetpolConfig;
pub use relay_args::{FollowArgs, RelayArgs};
pub use resolver_args::{ResolverArgs, ResolverMode};
pub use run_args::RunArgs;
pub use settings::Settings;
pub use source_args::SourceArgs;
pub use standby_args::{Standby, StandbyArgs};

use crate::resolver::ResolverSettings;

/// A value that cannot be used. Exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("--{flag}: {reason}")]
pub struct ConfigError {
    /// Name of the flag, without the leading dashes.
    pub flag: &'static str,
    /// What is wrong and what to write instead.
    pub reason: String,
}

impl ConfigError {
    fn new(flag: &'static str, reason: impl Into<String>) -> Self {
        let reason = reason.into();
        Self { flag, reason }
    }
}

/// Checked settings of `holdfast-agent run`.
#[derive(Clone, Debug)]
pub struct Config {
    /// The flags, for all settings that need no further check.
    pub flags: RunArgs,
    /// Settings of the core, without boot id and start count, which the run adds.
    pub core: CoreConfig,
    /// The API server that the cluster is read from.
    pub kubernetes: Option<ApiSettings>,
    /// Relays that the objects of the cluster are read from, in the place of the API server.
    pub relays: Option<RelaySettings>,
    /// Where names of EgressFirewalls are refreshed and shared; `None` = nowhere.
    pub resolver: Option<ResolverSettings>,
    /// The tunnel between nodes; `None` = this node has no part in it.
    pub tunnel: Option<TunnelSettings>,
    /// Name of this node; the host name if `--node-name` is absent.
    pub node_name: String,
    /// Where pods that run without an endpoint are found; `None` = nowhere.
    pub netns_dir: Option<PathBuf>,
    /// Address of metrics and health.
    pub metrics_address: MetricsAddress,
}

impl Config {
    /// Directory of the per-endpoint directories and checkpoints.
    pub fn state(&self) -> PathBuf {
        self.flags.state_dir.join("state")
    }

    /// How the kernel datapath is set up.
    pub(crate) fn kernel(&self) -> KernelConfig {
        KernelConfig {
            bpf_root: self.flags.bpf_root.clone(),
            ipv4: self.core.enable_ipv4,
            ipv6: self.core.enable_ipv6,
            sizes: self.flags.map_sizes,
            transparent: self.flags.dnsproxy_enable_transparent_mode,
            tcx: self.flags.enable_tcx,
            dns_quota: self.flags.endpoint_dns_quota,
            deny_responses: self.flags.deny,
            tunnel: self.tunnel.clone(),
            sdp_group: self.flags.sdp_group,
        }
    }

    /// Key of the startup taint; see [`SourceArgs::startup_taint`].
    pub(crate) fn startup_taint(&self) -> Option<&str> {
        self.flags.cluster.source.startup_taint()
    }

    /// Port of Cilium's FQDNData on 127.0.0.1; `None` = off.
    pub(crate) fn fqdndata_port(&self) -> Option<u16> {
        let port = self.flags.standalone_dns_proxy_server_port;
        (self.flags.enable_standalone_dns_proxy && port != 0).then_some(port)
    }
}
