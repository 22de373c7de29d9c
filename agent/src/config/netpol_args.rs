//! `holdfast-agent netpol …`: flags, and their help.

use std::path::PathBuf;

use agent_cluster::{ApiSettings, relay_settings::RelaySettings};
use agent_core::policy::trace::Port;
use clap::{Arg, ArgAction, Args, Subcommand};
use daemon::{
    command_line::{
        file_args::FileArgs, health::HealthArgs, log_args::LogArgs,
        metrics_address::MetricsAddress, output::OutputArgs,
    },
    flags,
};

use super::{
    ConfigError, FollowArgs, PluginArgs, SourceArgs, destination::Destination,
    existing_dir::existing_dir, relay_args, render_args::VswitchArgs,
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
    /// Exit 0 if the running program is ready; otherwise print the missing parts and exit 1. For readiness and liveness probes
    Health {
        #[command(flatten)]
        what: HealthArgs,
        #[command(flatten)]
        client: NetpolClientArgs,
    },
    /// List the pods of this node: their interfaces and the policies that restrict them
    Pods(NetpolClientArgs),
    /// Show whether a pod may connect to an address or another pod, at one port or at which, and the rules that decide it. Exit 1 if it may at none of these ports, or if the policies are not in force
    Why(NetpolWhyArgs),
}

/// `netpol run`
#[derive(Clone, Debug, Args)]
#[command(mut_args = flags::complete, mut_args = in_own_words)]
pub struct NetpolRunArgs {
    /// Directory of policy documents (YAML or JSON): NetworkPolicies, with Pods and Namespaces. Every change
    /// in it is applied
    #[arg(long, value_name = "DIR", value_parser = existing_dir())]
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
    /// Unix socket through which commands reach the running program; only root can connect to it
    #[arg(long, value_name = "PATH", default_value = ADMIN_SOCKET, env = "HOLDFAST_NETPOL_ADMIN_SOCKET")]
    pub admin_socket: PathBuf,
    /// Address of /metrics, /healthz and /readyz: HOST:PORT, :PORT for every address of the node, or off
    #[arg(
        long,
        value_name = "[HOST]:PORT",
        default_value = "127.0.0.1:9963",
        env = "HOLDFAST_NETPOL_METRICS_ADDRESS"
    )]
    pub metrics_address: MetricsAddress,
    #[command(flatten)]
    pub plugin: PluginArgs,
    /// Print the change of the table that the documents would make, and end. Nothing is changed
    #[arg(long)]
    pub dry_run: bool,
    /// Delete the table when the process is stopped, which opens every pod. Without it the last policy
    /// stays in force
    #[arg(long, default_value_t = false, action = ArgAction::Set)]
    pub flush_on_exit: bool,
    /// Set net.bridge.bridge-nf-call-iptables and bridge-nf-call-ip6tables to 1 while pods are on a
    /// bridge, and bridge-nf-filter-vlan-tagged if it filters VLANs: without them the kernel shows packets
    /// between pods of one bridge to no rule
    #[arg(long, default_value_t = false, action = ArgAction::Set)]
    pub set_bridge_sysctls: bool,
    /// Log dropped packets with their pod and the policies about it, at most 50 in a second. Each copy of
    /// a packet costs time
    #[arg(long, default_value_t = false, action = ArgAction::Set)]
    pub log_drops: bool,
    /// Write the policies of this node's pods into this directory whenever they change, as access lists
    /// and session rules for a VPP vswitch: acl.txt, acl.json and session-rules.json
    #[arg(long, value_name = "DIR")]
    pub vpp_export_dir: Option<PathBuf>,
    #[command(flatten)]
    pub vswitch: VswitchArgs,
    #[command(flatten)]
    pub files: FileArgs,
    #[command(flatten)]
    pub log: LogArgs,
}

/// Help and variables of flags that `run` has too, where they mean other things.
fn in_own_words(arg: Arg) -> Arg {
    let help = match arg.get_long() {
        Some("kubernetes") => {
            "Read pods, namespaces and policies from the Kubernetes API: with the service account of this \
             pod, or with --kubeconfig. --policy-dir may be read as well; of two documents of one kind and \
             name, the document of the cluster counts"
        }
        Some("daemonset") => {
            "DaemonSet of this pod, in the namespace of its service account. When the process is stopped \
             and this DaemonSet was deleted, it deletes the table and its state"
        }
        Some("node-name") => {
            "Name of this node: pods whose spec.nodeName it is are its own [default: the host name]"
        }
        Some("agent-not-ready-taint-key") => {
            "Key of the taint that keeps pods off a node until policy is in force there, set by a node pool \
             or the kubelet. With --kubernetes, it is removed from the Node once the table is in force; \
             other taints stay. Empty: no taint is removed"
        }
        Some("cluster-name") => {
            "Name of this node's cluster: a stored list of another cluster is not used"
        }
        Some("k8s-relay") => {
            "Read the objects of the cluster from a relay (`holdfast-agent relay`) and not from the API \
             server: host:port, several with commas. The CiliumNode of this node, Events about refused \
             policies and the startup taint are still written to the API server"
        }
        Some("node-output-interface" | "nat-loopback") => return arg.requires("vpp_export_dir"),
        Some("config") => return arg.env("HOLDFAST_NETPOL_CONFIG"),
        Some("config-dir") => return arg.env("HOLDFAST_NETPOL_CONFIG_DIR"),
        _ => return arg,
    };
    arg.help(help).long_help(None)
}

/// Socket of `netpol run` and output options.
#[derive(Clone, Debug, Args)]
pub struct NetpolClientArgs {
    /// Unix socket through which commands reach the running program
    #[arg(long, value_name = "PATH", default_value = ADMIN_SOCKET, env = "HOLDFAST_NETPOL_ADMIN_SOCKET")]
    pub admin_socket: PathBuf,
    #[command(flatten)]
    pub form: OutputArgs,
}

/// `netpol why`
#[derive(Clone, Debug, Args)]
pub struct NetpolWhyArgs {
    /// Sender: a pod, as namespace/name, or an address
    pub from: String,
    /// Receiver: a pod, as namespace/name, or an address; with or without a port: 10.1.0.2:5432,
    /// shop/db-0:53/UDP; put an IPv6 address with a port in brackets: `[2001:db8::1]:443`
    pub to: Destination,
    /// Destination port, unless the receiver has it: 443, 443/TCP, 53/UDP, 8/ICMP. Without a port, the
    /// open ports are listed
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
    /// Address of metrics and health.
    pub metrics_address: MetricsAddress,
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
            metrics_address: args.metrics_address.clone(),
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
    fn the_help_is_about_this_program() {
        use clap::CommandFactory as _;
        let mut cli = Cli::command();
        let netpol = cli.find_subcommand_mut("netpol").unwrap();
        let help = netpol
            .find_subcommand_mut("run")
            .unwrap()
            .render_long_help();
        let help = help.to_string();
        for of_run in ["The agent", "takes everything off", "cleanup"] {
            assert!(!help.contains(of_run), "{of_run}: {help}");
        }
        assert!(help.contains("policy is in force there"), "{help}");
    }

    #[test]
    fn flags_of_exports_need_their_directory() {
        for flag in ["--nat-loopback=10.0.0.1", "--node-output-interface=up"] {
            let line = ["holdfast-agent", "netpol", "run", "--policy-dir=/", flag];
            let error = Cli::try_parse_from(line).unwrap_err().to_string();
            assert!(error.contains("--vpp-export-dir"), "{error}");
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
        assert_eq!(config.metrics_address.to_string(), ":7");
    }
}
