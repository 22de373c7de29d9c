//! Command line of the agent: subcommands, and the flags of those that are clients of a running agent.
//! Flags of `run` and `relay` have files of their own.
#![allow(rustdoc::bare_urls, reason = "texts of --help")]

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
};

use agent_core::{
    named_port::{NamedPortError, NamedPorts},
    policy::{mode::PolicyMode, trace::Port},
};
use clap::{Args, Parser, Subcommand};
use daemon::{
    command_line::{
        endpoint_args::EndpointArg,
        failure::EXIT_CODES,
        health::HealthArgs,
        output::{Output, OutputArgs},
        values::{address, whole},
    },
    flags,
};
use dns_policy::{pattern, rule::NameRule};

use super::{
    cluster_command::ClusterCommand,
    container_args::OciHookArgs,
    destination::{Receiver, sender},
    identity_args::IdentityCommand,
    netpol_args::NetpolCommand,
    observe_args::ObserveArgs,
    relay_args::RelayArgs,
    render_args::RenderArgs,
    run_args::RunArgs,
    why_args::WhyArgs,
};
use crate::endpoint::source::{EndpointError, own_label};

/// Default of `--admin-socket`.
pub(crate) const ADMIN_SOCKET: &str = "/run/holdfast/agent-admin.sock";

/// DNS-name egress policy for this node: runs the agent, and sends requests to the running one.
#[derive(Debug, Parser)]
#[command(
    name = "holdfast-agent",
    version,
    after_help = format!(
        "First steps, as root:\n  \
         holdfast-agent run --policy-dir DIR\n\
         and in another shell:\n  \
         holdfast-agent endpoint add --netns pod1 --ifname eth0 --labels k8s:app=web\n  \
         holdfast-agent status\n\n{EXIT_CODES}"
    )
)]
pub struct Cli {
    /// Subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// Subcommands of the agent.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the agent: it writes policy, endpoints and learned names into the BPF maps and keeps them up to date. Needs root
    Run(Box<RunArgs>),
    /// Run a relay for a large cluster: it reads the objects of the cluster from the API server and sends them to agents that are started with --k8s-relay
    Relay(Box<RelayArgs>),
    /// Show the state of the running agent, and its recent failures
    Status(StatusArgs),
    /// Make the agent that stands by (--standby) take over, for example after an upgrade. First the standby reads the files and maps of the owner with its own version: if it cannot, the owner goes on, and the reason is printed. Exit 0 when the standby owns the node and is ready
    Handover(ClientArgs),
    /// Exit 0 if the running program is ready; otherwise print the missing parts and exit 1. For readiness and liveness probes
    Health {
        #[command(flatten)]
        what: HealthArgs,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Show the version of this program and of the running one
    Version(ClientArgs),
    /// List, add and remove endpoints of this node
    #[command(subcommand)]
    Endpoint(EndpointCommand),
    /// List, check and trace policies
    #[command(subcommand)]
    Policy(PolicyCommand),
    /// List identities, the numbers of sets of labels, and assign numbers without an API server
    #[command(subcommand)]
    Identity(IdentityCommand),
    /// List prefixes and their identities
    #[command(subcommand)]
    Ip(IpCommand),
    /// List the selectors in use and the identities that each one selects
    #[command(subcommand)]
    Selectors(SelectorsCommand),
    /// List or remove names learned from DNS answers
    #[command(subcommand)]
    Fqdn(FqdnCommand),
    /// List names of EgressFirewalls that are looked up again before they expire, and look one up
    #[command(subcommand)]
    Resolver(ResolverCommand),
    /// Print the pinned BPF maps; works without a running agent. Needs root
    #[command(subcommand)]
    Bpf(BpfCommand),
    /// Take everything that agents have put on this node off it, so that its pods are open and new pods start without the agent: CNI configuration, programs, maps, routes, rules, state. Stop the agent first. The CNI plugin's program stays, because pods that end may need it. Needs root
    Cleanup(CleanupArgs),
    /// Print packets that the datapath dropped and forwarded
    Observe(ObserveArgs),
    /// Show whether an endpoint may connect to a name or an address, and each step that decides it: for a Service, each backend. Names the node and the command for a side that another node judges. Exit 1 if packets do not pass, or not at each backend
    Why(WhyArgs),
    /// Put a container under policy before it starts: container runtimes run this as an OCI hook of the stage createRuntime, with the container's state on standard input
    OciHook(OciHookArgs),
    /// Enforce NetworkPolicies without eBPF programs: run it, and ask the running one
    #[command(subcommand)]
    Netpol(NetpolCommand),
    /// Show the state of the agents of a whole cluster, from a machine with kubectl and a kubeconfig
    #[command(subcommand)]
    Cluster(ClusterCommand),
}

/// Socket of the agent and output options.
#[derive(Clone, Debug, Args)]
pub struct ClientArgs {
    #[command(flatten)]
    pub socket: SocketArgs,
    #[command(flatten)]
    pub form: OutputArgs,
}

impl ClientArgs {
    pub fn admin_socket(&self) -> &Path {
        &self.socket.admin_socket
    }

    pub fn output(&self) -> Output {
        self.form.output
    }
}

/// Socket of the agent.
#[derive(Clone, Debug, Args)]
pub struct SocketArgs {
    /// Unix socket through which commands reach the running program
    #[arg(long, value_name = "PATH", default_value = ADMIN_SOCKET, env = "HOLDFAST_ADMIN_SOCKET")]
    pub admin_socket: PathBuf,
}

/// `status`
#[derive(Clone, Debug, Args)]
pub struct StatusArgs {
    /// Also show the answers that each proxy holds, and the use of each limit
    #[arg(short, long)]
    pub verbose: bool,
    #[command(flatten)]
    pub client: ClientArgs,
}

/// `endpoint …`
#[derive(Debug, Subcommand)]
pub enum EndpointCommand {
    /// List all endpoints
    List(ClientArgs),
    /// Show one endpoint with its policy and names
    Get {
        #[command(flatten)]
        endpoint: EndpointArg,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Put an interface of a network namespace under policy. A restart of the agent restores it. If the interface is an endpoint already, its labels, ports, addresses and mode are replaced
    Add(EndpointAddArgs),
    /// Remove an endpoint that was added with `add`: it is no longer restricted
    Remove {
        #[command(flatten)]
        endpoint: EndpointArg,
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// `endpoint add`
#[derive(Debug, Args)]
pub struct EndpointAddArgs {
    /// Name of the network namespace, as `ip netns` shows it, or an absolute path
    #[arg(
        long,
        value_name = "NAME",
        required_unless_present = "pid",
        conflicts_with = "pid"
    )]
    pub netns: Option<String>,
    /// Process id of a process in the network namespace, as the agent's own PID namespace numbers it
    #[arg(long, value_name = "N", value_parser = whole(1..=u32::MAX))]
    pub pid: Option<u32>,
    /// Interface inside the namespace (one end of a veth pair)
    #[arg(long, value_name = "NAME", default_value = "eth0")]
    pub ifname: String,
    /// Labels of the form source:key[=value], separated by commas; for example k8s:app=web
    #[arg(long, value_name = "LABEL", value_delimiter = ',', required_unless_present = "pod", conflicts_with = "pod", value_parser = label)]
    pub labels: Vec<String>,
    /// Pod that the endpoint is, in place of labels: the endpoint has the labels and named ports
    /// of its Pod document in --policy-dir, and follows it
    #[arg(long, value_name = "NAMESPACE/NAME", conflicts_with = "named_ports")]
    pub pod: Option<String>,
    /// Named port, which policies may use in place of the number: http=80/TCP; may be repeated
    #[arg(
        long = "named-port",
        value_name = "NAME=PORT[/PROTOCOL]",
        value_delimiter = ',',
        value_parser = named_port
    )]
    pub named_ports: Vec<String>,
    /// Address of the endpoint, at most one of each family; default: the addresses that the
    /// interface has now. On a bridge port, addresses that the pod adds later are ignored
    #[arg(long = "address", value_name = "ADDRESS", value_delimiter = ',', value_parser = address)]
    pub addresses: Vec<IpAddr>,
    /// When this endpoint is restricted; overrides the agent's --enable-policy
    #[arg(long, value_name = "WHEN", value_enum)]
    pub enable_policy: Option<PolicyMode>,
    #[command(flatten)]
    pub client: ClientArgs,
}

fn label(text: &str) -> Result<String, EndpointError> {
    own_label(text)?;
    Ok(text.to_owned())
}

fn match_pattern(text: &str) -> Result<String, String> {
    let valid = pattern::validate_rule(&NameRule::Pattern(text.to_owned()));
    valid.map_err(|error| format!("{error}; write a pattern such as *.example.com"))?;
    Ok(text.to_owned())
}

fn named_port(text: &str) -> Result<String, NamedPortError> {
    NamedPorts::parse(&[text])?;
    Ok(text.to_owned())
}

/// `policy …`
#[derive(Debug, Subcommand)]
pub enum PolicyCommand {
    /// List the policy documents in force, and the refused ones
    Get(ClientArgs),
    /// Check policy documents without a running agent. Exit 1 if one is refused
    Validate {
        /// YAML or JSON files, or directories of them; - is standard input
        #[arg(value_name = "FILE", required = true)]
        files: Vec<PathBuf>,
        /// Also warn about rules that select fewer pods where agents have --high-scale-prune
        #[arg(long)]
        pruned: bool,
        #[command(flatten)]
        form: OutputArgs,
    },
    /// Show the verdict for a packet and the rules that decide it. Exit 1 if it is dropped
    Trace(TraceArgs),
    /// Show what NetworkPolicies mean in addresses, without a running agent. With --to exit 1 if renderings disagree
    Render(RenderArgs),
}

/// `policy trace`
#[derive(Debug, Args)]
pub struct TraceArgs {
    /// Sender: labels (k8s:app=web,k8s:tier=front), or an endpoint of the running agent
    #[arg(long, value_name = "SENDER", value_parser = sender)]
    pub from: String,
    /// Receiver: labels, an address, a DNS name, or an endpoint or pod of the running agent; with or
    /// without a port (www.example.com:443), or a URL (https://www.example.com)
    #[arg(long, value_name = "RECEIVER")]
    pub to: Receiver,
    /// Destination port, unless --to has it: 443, 443/TCP, 53/UDP, 8/ICMP (the type)
    #[arg(long, value_name = "PORT")]
    pub port: Option<Port>,
    /// Named port, of the receiver's labels: http=80/TCP; may be repeated
    #[arg(
        long = "named-port",
        value_name = "NAME=PORT[/PROTOCOL]",
        value_delimiter = ',',
        value_parser = named_port
    )]
    pub named_ports: Vec<String>,
    /// Use the policies in this file or directory, without a running agent; - is standard input; may be repeated
    #[arg(long = "policy-file", value_name = "FILE")]
    pub policy_files: Vec<PathBuf>,
    #[command(flatten)]
    pub client: ClientArgs,
}

/// The port of a traced packet is missing, or given twice.
#[derive(Debug, thiserror::Error)]
pub enum TracePortError {
    #[error(
        "the port is missing: add --port, for example --port 443, or write it behind --to, as in \
         www.example.com:443"
    )]
    Missing,
    #[error("--port {port} is not the port of --to, {of_to}: leave one of them out")]
    Twice { port: Port, of_to: Port },
}

impl TraceArgs {
    /// The destination port, of `--port` or of `--to`.
    pub fn destination_port(&self) -> Result<Port, TracePortError> {
        match (self.port, self.to.port) {
            (Some(port), Some(of_to)) if port != of_to => {
                Err(TracePortError::Twice { port, of_to })
            }
            (port, of_to) => port.or(of_to).ok_or(TracePortError::Missing),
        }
    }
}

/// `ip …`
#[derive(Debug, Subcommand)]
pub enum IpCommand {
    /// List all prefixes
    List(ClientArgs),
    /// Show the longest prefix that covers an address, and its identity
    Get {
        /// Address
        #[arg(value_parser = address)]
        address: IpAddr,
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// `selectors …`
#[derive(Debug, Subcommand)]
pub enum SelectorsCommand {
    /// List all selectors
    List(ClientArgs),
}

/// `fqdn …`
#[derive(Debug, Subcommand)]
pub enum FqdnCommand {
    /// List or clean the name cache
    #[command(subcommand)]
    Cache(FqdnCacheCommand),
    /// List the name selectors in use
    Names(ClientArgs),
}

/// `fqdn cache …`
#[derive(Debug, Subcommand)]
pub enum FqdnCacheCommand {
    /// List names with addresses and TTLs
    List(ClientArgs),
    /// Remove names from the cache and close their addresses. A name opens again when a pod looks it up
    Clean {
        /// Only names that match this matchPattern; default: all names
        #[arg(long, value_name = "PATTERN", value_parser = match_pattern)]
        matchpattern: Option<String>,
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// `resolver …`
#[derive(Debug, Subcommand)]
pub enum ResolverCommand {
    /// List DNSNameResolver objects
    List(ClientArgs),
    /// Show the names of one object: addresses with the rest of their TTLs, failures, the next look-up, and where the addresses come from
    Get {
        /// A name, with or without its final dot, or the name of an object
        name: String,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Look a name up at the trusted DNS servers now. The agent that writes objects adds the result to those of the name
    Lookup {
        /// The name
        name: String,
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// `bpf …`
#[derive(Debug, Subcommand)]
pub enum BpfCommand {
    /// Map from prefix to identity
    #[command(subcommand)]
    Ipcache(BpfList),
    /// Map from local address to endpoint
    #[command(subcommand)]
    Lxc(BpfList),
    /// Policy map of one endpoint
    #[command(subcommand)]
    Policy(BpfPolicy),
    /// Tracked connections
    #[command(subcommand)]
    Ct(BpfList),
    /// Blocks outside of the cluster, to which nothing is wrapped (--high-scale-ipcache)
    #[command(subcommand)]
    World(BpfList),
    /// Senders of packets that came by the tunnel between nodes, each with the identity that came with its
    /// last packet
    #[command(subcommand)]
    Sources(BpfList),
}

/// `bpf … list`
#[derive(Debug, Subcommand)]
pub enum BpfList {
    /// Print all entries
    List(BpfArgs),
}

/// `bpf policy …`
#[derive(Debug, Subcommand)]
pub enum BpfPolicy {
    /// Print all entries
    List {
        #[command(flatten)]
        endpoint: EndpointArg,
        #[command(flatten)]
        socket: SocketArgs,
        #[command(flatten)]
        bpf: BpfArgs,
    },
}

/// `cleanup`
#[derive(Clone, Debug, Args)]
#[command(mut_args = flags::complete)]
pub struct CleanupArgs {
    /// Directory that has the node's root, such as /host in a pod of `kubectl debug node`. The other
    /// directories are those below it
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub host_root: PathBuf,
    /// Directory on a BPF file system that has the agent's pins, in tc/globals/
    #[arg(long, value_name = "DIR", default_value = shared_maps::pin::BPF_ROOT)]
    pub bpf_root: PathBuf,
    /// Directory of the agent's state
    #[arg(long, value_name = "DIR", default_value = "/var/run/holdfast")]
    pub state_dir: PathBuf,
    /// Directory in which the agent stores the endpoints that `endpoint add` added
    #[arg(
        long,
        value_name = "DIR",
        default_value = "/var/lib/holdfast/endpoints"
    )]
    pub endpoint_store: PathBuf,
    /// Directory of the node's CNI configuration, from which 05-holdfast.conflist is removed
    #[arg(long, value_name = "DIR", default_value = "/etc/cni/net.d")]
    pub cni_conf_dir: PathBuf,
    /// Settings file of `run`: its directories are used, unless flags or the environment name others
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Directory of the pins and output options.
#[derive(Clone, Debug, Args)]
pub struct BpfArgs {
    /// Directory on a BPF file system that has the agent's pins, in tc/globals/
    #[arg(long, value_name = "DIR", default_value = shared_maps::pin::BPF_ROOT, env = "HOLDFAST_BPF_ROOT")]
    pub bpf_root: PathBuf,
    #[command(flatten)]
    pub form: OutputArgs,
}
