//! `holdfast-agent netpol …`: flags, and their help.

use std::{net::SocketAddr, path::PathBuf};

use agent_cluster::{ApiSettings, relay_settings::RelaySettings};
use agent_core::policy::trace::Port;
use clap::{ArgAction, Args, Subcommand};
use daemon::flags;

use super::{
    ConfigError, FollowArgs, SourceArgs, args::Output, existing_dir::existing_dir,
    metrics_address::metrics_address, relay_args,
};

/// Default of `--admin-socket`.
const ADMIN_SOCKET: &str = "/run/holdfast/netpol-admin.sock";

/// `netpol …`
#[derive(Debug, Subcommand)]
pub enum NetpolCommand {
    /// Enforce the NetworkPolicies of this node's pods with nftables, without eBPF programs. Needs root or CAP_NET_ADMIN
    Run(Box<NetpolRunArgs>),
    /// Show the state of the running `netpol run`, and what it does not enforce
    Status(NetpolClientArgs),
    /// List the pods of this node: their interfaces and the policies that restrict them
    Pods(NetpolClientArgs),
    /// Show whether a pod may connect to an address or another pod, and the rules that decide it. Exit 1 if it may not
    Why(NetpolWhyArgs),
}

/// `netpol run`
#[derive(Clone, Debug, Args)]
#[command(mut_args = flags::complete)]
pub struct NetpolRunArgs {
    /// Directory of documents (YAML or JSON): NetworkPolicies, Pods and Namespaces. Every change in it is
    /// applied
    #[arg(long, value_parser = existing_dir())]
    pub policy_dir: Option<PathBuf>,
    #[command(flatten)]
    pub source: SourceArgs,
    #[command(flatten)]
    pub follow: FollowArgs,
    /// Directory of the files from which a restart continues: good versions of documents, and the list
    /// of the cluster
    #[arg(
        long,
        value_name = "DIR",
        default_value = "/var/run/holdfast/netpol",
        env = "HOLDFAST_NETPOL_STATE_DIR"
    )]
    pub state_dir: PathBuf,
    /// Unix socket for `netpol status`, `pods` and `why`
    #[arg(long, value_name = "PATH", default_value = ADMIN_SOCKET, env = "HOLDFAST_NETPOL_ADMIN_SOCKET")]
    pub admin_socket: PathBuf,
    /// Address of /metrics, /healthz and /readyz; "off" for none
    #[arg(
        long,
        value_name = "ADDRESS:PORT",
        default_value = "127.0.0.1:9963",
        env = "HOLDFAST_NETPOL_METRICS_ADDRESS"
    )]
    pub metrics_address: String,
    /// Print the change of the table that the documents would make, and end. Nothing is changed
    #[arg(long)]
    pub dry_run: bool,
    /// Delete the table when the process is stopped, which opens every pod. Without it the last policy
    /// stays in force
    #[arg(long, default_value_t = false, action = ArgAction::Set)]
    pub flush_on_exit: bool,
    /// Set net.bridge.bridge-nf-call-iptables and bridge-nf-call-ip6tables to 1 while pods are on a
    /// bridge: without them the kernel shows packets between pods of one bridge to no rule
    #[arg(long, default_value_t = false, action = ArgAction::Set)]
    pub set_bridge_sysctls: bool,
    /// Log dropped packets with their pod and the policies about it, at most 50 in a second. Each copy of
    /// a packet costs time
    #[arg(long, default_value_t = false, action = ArgAction::Set)]
    pub log_drops: bool,
    /// YAML file with any of these settings, named without dashes. Flags and environment override it; an
    /// unknown key is an error
    #[arg(long, value_name = "FILE", env = "HOLDFAST_NETPOL_CONFIG")]
    pub config: Option<PathBuf>,
    /// Directory with one file per flag of this command, named without dashes, such as a mounted
    /// ConfigMap. Flags, environment and --config override it. Unknown keys are ignored and listed in
    /// the log
    #[arg(long, value_name = "DIR", env = "HOLDFAST_NETPOL_CONFIG_DIR")]
    pub config_dir: Option<PathBuf>,
    /// Log as JSON lines
    #[arg(long, default_value_t = false)]
    pub log_json: bool,
    /// Lowest severity that is logged: error, warn, info, debug, trace or off. Modules may have their
    /// own, for example info,holdfast_agent=debug
    #[arg(long, default_value = "info")]
    pub log: String,
}

/// Socket of `netpol run` and output options.
#[derive(Clone, Debug, Args)]
pub struct NetpolClientArgs {
    /// Socket of the running `netpol run`
    #[arg(long, default_value = ADMIN_SOCKET, env = "HOLDFAST_NETPOL_ADMIN_SOCKET")]
    pub admin_socket: PathBuf,
    /// Format of the output
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    pub output: Output,
}

/// `netpol why`
#[derive(Clone, Debug, Args)]
pub struct NetpolWhyArgs {
    /// Sender: a pod, as namespace/name, or an address
    pub from: String,
    /// Receiver: a pod, as namespace/name, or an address
    pub to: String,
    /// Destination port, for example 443, 443/TCP or 53/UDP
    #[arg(long)]
    pub port: Option<Port>,
    #[command(flatten)]
    pub client: NetpolClientArgs,
}

/// Checked settings of `netpol run`.
#[derive(Clone, Debug)]
pub struct NetpolConfig {
    /// The flags, for all settings that need no further check.
    pub flags: NetpolRunArgs,
    /// The API server that the cluster is read from.
    pub kubernetes: Option<ApiSettings>,
    /// Relays in the place of the API server.
    pub relays: Option<RelaySettings>,
    /// Name of this node: pods with it in `spec.nodeName` are this node's.
    pub node_name: String,
    /// Address of metrics and health; `None` = off.
    pub metrics_address: Option<SocketAddr>,
}

impl TryFrom<NetpolRunArgs> for NetpolConfig {
    type Error = ConfigError;

    fn try_from(args: NetpolRunArgs) -> Result<Self, ConfigError> {
        let kubernetes = args.source.kubernetes(&args.follow)?;
        if kubernetes.is_none() && args.policy_dir.is_none() {
            return Err(ConfigError::new(
                "policy-dir",
                "is missing, and so is --kubernetes: without either there is no policy to enforce; give \
                 a directory of NetworkPolicy, Pod and Namespace documents, or --kubernetes",
            ));
        }
        Ok(Self {
            kubernetes,
            relays: relay_args::relays(args.follow.clone())?,
            node_name: args.source.node_name(),
            metrics_address: metrics_address(&args.metrics_address)?,
            flags: args,
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::config::{Cli, Command};

    fn config(flags: &[&str]) -> Result<NetpolConfig, ConfigError> {
        let line = ["holdfast-agent", "netpol", "run"].iter().chain(flags);
        match Cli::try_parse_from(line).unwrap().command {
            Command::Netpol(NetpolCommand::Run(args)) => NetpolConfig::try_from(*args),
            command => panic!("{command:?}"),
        }
    }

    #[test]
    fn a_source_is_needed() {
        let error = config(&[]).unwrap_err().to_string();
        assert!(error.starts_with("--policy-dir: is missing"), "{error}");
        assert!(error.contains("--kubernetes"), "{error}");
        let error = config(&["--k8s-relay=192.0.2.1:9971"]).unwrap_err();
        assert_eq!(error.flag, "k8s-relay");
        let config = config(&["--policy-dir=/", "--metrics-address=:7"]).unwrap();
        assert!(config.kubernetes.is_none());
        assert_eq!(config.metrics_address.unwrap().port(), 7);
    }
}
