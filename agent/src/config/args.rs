//! The command line as typed.
#![expect(
    missing_docs,
    reason = "flattened fields take the texts of what they flatten"
)]

use std::{net::IpAddr, path::PathBuf, str::FromStr, time::Duration};

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use dns_policy::reject_code::RejectCode;

use super::MaxIdentities;
use crate::{
    datapath::kernel::MapSizes,
    fqdn::refused::{self, RefusedValue},
    labels::{Label, LabelError},
    named_port::{NamedPortError, NamedPorts},
    policy::{
        mode::PolicyMode,
        trace::{Port, PortError},
    },
};

/// Default of `--admin-socket`.
pub const ADMIN_SOCKET: &str = "/run/holdfast/agent-admin.sock";

/// DNS-name egress policy for this node: the agent, and a client of the running one.
#[derive(Debug, Parser)]
#[command(
    name = "holdfast-agent",
    version,
    after_help = "Exit codes: 0 fine, 1 failed, 2 usage or configuration.\n\
                  A first look: holdfast-agent run --policy-dir DIR, then in another shell\n\
                  holdfast-agent endpoint add --netns pod1 --ifname eth0 --labels k8s:app=web\n\
                  and holdfast-agent status."
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the agent: keep the datapath in step with policy, endpoints and names
    Run(Box<RunArgs>),
    /// How the running agent is, and what it could not do
    Status(StatusArgs),
    /// Endpoints of this node
    #[command(subcommand)]
    Endpoint(EndpointCommand),
    /// Policies
    #[command(subcommand)]
    Policy(PolicyCommand),
    /// Identities: numbers for sets of labels
    #[command(subcommand)]
    Identity(IdentityCommand),
    /// Prefixes and the identities they map to
    #[command(subcommand)]
    Ip(IpCommand),
    /// Selectors in use and what they select
    #[command(subcommand)]
    Selectors(SelectorsCommand),
    /// Names learned from DNS answers
    #[command(subcommand)]
    Fqdn(FqdnCommand),
    /// The pinned maps, read directly: works without an agent
    #[command(subcommand)]
    Bpf(BpfCommand),
    /// What the datapath dropped and forwarded
    Observe(ObserveArgs),
    /// May an endpoint talk to a name or an address, and what makes it so? Exit 1 if not
    Why(WhyArgs),
}

/// How to reach the agent and how to print.
#[derive(Clone, Debug, Args)]
pub struct ClientArgs {
    /// Socket of the running agent
    #[arg(long, default_value = ADMIN_SOCKET, env = "HOLDFAST_ADMIN_SOCKET")]
    pub admin_socket: PathBuf,
    /// Format of the output
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    pub output: Output,
}

/// `status`
#[derive(Clone, Debug, Args)]
pub struct StatusArgs {
    /// Also each proxy's answers under way, and how far limits are used up
    #[arg(short, long)]
    pub verbose: bool,
    #[command(flatten)]
    pub client: ClientArgs,
}

/// Format of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Columns for people.
    Table,
    /// One JSON value.
    Json,
}

/// `endpoint …`
#[derive(Debug, Subcommand)]
pub enum EndpointCommand {
    /// All endpoints
    List(ClientArgs),
    /// One endpoint with its policy and names
    Get {
        /// Endpoint number
        id: u16,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Put a network namespace's interface under policy; it is remembered across restarts
    Add(EndpointAddArgs),
    /// Take an endpoint added with `add` out of policy again
    Remove {
        /// Endpoint number, or its key as `list` shows it
        endpoint: String,
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// `endpoint add`
#[derive(Debug, Args)]
pub struct EndpointAddArgs {
    /// Network namespace by name, as `ip netns` shows it
    #[arg(long, required_unless_present = "pid", conflicts_with = "pid")]
    pub netns: Option<String>,
    /// Network namespace by a process in it
    #[arg(long)]
    pub pid: Option<u32>,
    /// Interface inside the namespace (one end of a veth pair)
    #[arg(long, default_value = "eth0")]
    pub ifname: String,
    /// Labels, source:key[=value], separated by commas
    #[arg(long, value_delimiter = ',', required = true, value_parser = label)]
    pub labels: Vec<String>,
    /// A port that policies may call by a name: http=80/TCP; may be repeated
    #[arg(
        long = "named-port",
        value_name = "NAME=PORT[/PROTOCOL]",
        value_delimiter = ',',
        value_parser = named_port
    )]
    pub named_ports: Vec<String>,
    /// The only addresses that may count, at most one of each family; without it those that the
    /// interface has now. On a bridge port only they count later on, whatever the pod adds
    #[arg(long = "address", value_name = "ADDRESS", value_delimiter = ',')]
    pub addresses: Vec<IpAddr>,
    /// When this endpoint is restricted, whatever the agent's --enable-policy says
    #[arg(long, value_enum)]
    pub enable_policy: Option<PolicyMode>,
    #[command(flatten)]
    pub client: ClientArgs,
}

fn label(text: &str) -> Result<String, LabelError> {
    Label::parse(text)?;
    Ok(text.to_owned())
}

fn named_port(text: &str) -> Result<String, NamedPortError> {
    NamedPorts::parse(&[text])?;
    Ok(text.to_owned())
}

/// `policy …`
#[derive(Debug, Subcommand)]
pub enum PolicyCommand {
    /// Policy documents in force, and those refused
    Get(ClientArgs),
    /// Check documents without a running agent; exit 1 if one is refused
    Validate {
        /// YAML or JSON files
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// Format of the output
        #[arg(short, long, value_enum, default_value_t = Output::Table)]
        output: Output,
    },
    /// What policy says of a packet, and by which rules; exit 1 if it is dropped
    Trace(TraceArgs),
}

/// `policy trace`
#[derive(Debug, Args)]
pub struct TraceArgs {
    /// Who sends: labels (k8s:app=web,k8s:tier=front), or an endpoint of the running agent
    #[arg(long)]
    pub from: String,
    /// Who receives: labels, an address, a DNS name, or an endpoint of the running agent
    #[arg(long)]
    pub to: String,
    /// Destination port: 443, 443/TCP, 53/UDP, 8/ICMP (the type)
    #[arg(long)]
    pub port: Port,
    /// A named port of the labels that receive: http=80/TCP; may be repeated
    #[arg(
        long = "named-port",
        value_name = "NAME=PORT[/PROTOCOL]",
        value_delimiter = ',',
        value_parser = named_port
    )]
    pub named_ports: Vec<String>,
    /// Judge by these files alone, without an agent; may be repeated
    #[arg(long = "policy-file", value_name = "FILE")]
    pub policy_files: Vec<PathBuf>,
    #[command(flatten)]
    pub client: ClientArgs,
}

/// `identity …`
#[derive(Debug, Subcommand)]
pub enum IdentityCommand {
    /// All identities
    List(ClientArgs),
    /// One identity
    Get {
        /// Identity number
        id: u32,
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// `ip …`
#[derive(Debug, Subcommand)]
pub enum IpCommand {
    /// All prefixes
    List(ClientArgs),
    /// The prefix that covers an address, and its identity
    Get {
        /// Address
        address: IpAddr,
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// `selectors …`
#[derive(Debug, Subcommand)]
pub enum SelectorsCommand {
    /// All selectors
    List(ClientArgs),
}

/// `fqdn …`
#[derive(Debug, Subcommand)]
pub enum FqdnCommand {
    /// The name cache
    #[command(subcommand)]
    Cache(FqdnCacheCommand),
    /// Name selectors in use
    Names(ClientArgs),
}

/// `fqdn cache …`
#[derive(Debug, Subcommand)]
pub enum FqdnCacheCommand {
    /// Names, addresses, TTLs
    List(ClientArgs),
    /// Forget names; what they opened closes
    Clean {
        /// Only names that this matchPattern matches; without it all of them
        #[arg(long)]
        matchpattern: Option<String>,
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// `bpf …`
#[derive(Debug, Subcommand)]
pub enum BpfCommand {
    /// Prefix → identity
    #[command(subcommand)]
    Ipcache(BpfList),
    /// Local address → endpoint
    #[command(subcommand)]
    Lxc(BpfList),
    /// One endpoint's policy map
    #[command(subcommand)]
    Policy(BpfPolicy),
    /// Connections
    #[command(subcommand)]
    Ct(BpfList),
}

/// `bpf … list`
#[derive(Debug, Subcommand)]
pub enum BpfList {
    /// Dump the map
    List(BpfArgs),
}

/// `bpf policy …`
#[derive(Debug, Subcommand)]
pub enum BpfPolicy {
    /// Dump the map
    List {
        /// Endpoint number
        endpoint: u16,
        #[command(flatten)]
        bpf: BpfArgs,
    },
}

/// Where the pins are and how to print.
#[derive(Clone, Debug, Args)]
pub struct BpfArgs {
    /// Root of the BPF file system, or a directory in it
    #[arg(long, default_value = shared_maps::pin::BPF_ROOT, env = "HOLDFAST_BPF_ROOT")]
    pub bpf_root: PathBuf,
    /// Format of the output
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    pub output: Output,
}

/// `observe`
#[derive(Debug, Args)]
pub struct ObserveArgs {
    /// Go on printing as events come
    #[arg(short, long)]
    pub follow: bool,
    #[command(flatten)]
    pub client: ClientArgs,
}

/// `why`
#[derive(Debug, Args)]
pub struct WhyArgs {
    /// Number, key, name or address of the endpoint
    pub endpoint: String,
    /// Name or address, with a port or without: www.example.com:443, 203.0.113.7:53/UDP; an IPv6
    /// address with a port stands in brackets
    pub target: WhyTarget,
    /// The other way: may the endpoint receive from the target at this port of its own?
    #[arg(long)]
    pub ingress: bool,
    #[command(flatten)]
    pub client: ClientArgs,
}

/// The other side of `why`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WhyTarget {
    /// Name or address.
    pub host: String,
    /// Port.
    pub port: Option<Port>,
}

impl FromStr for WhyTarget {
    type Err = PortError;

    fn from_str(text: &str) -> Result<Self, PortError> {
        let bare = |host: &str| Self {
            host: host.to_owned(),
            port: None,
        };
        if text.parse::<IpAddr>().is_ok() {
            return Ok(bare(text));
        }
        match text.rsplit_once(':') {
            Some((host, port)) => Ok(Self {
                host: host
                    .trim_start_matches('[')
                    .trim_end_matches(']')
                    .to_owned(),
                port: Some(port.parse()?),
            }),
            None => Ok(bare(text.trim_start_matches('[').trim_end_matches(']'))),
        }
    }
}

/// `run`
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Root of the BPF file system, or a directory in it, for all pins
    #[arg(long, default_value = shared_maps::pin::BPF_ROOT, env = "HOLDFAST_BPF_ROOT")]
    pub bpf_root: PathBuf,
    /// Directory of the agent's lock and, in state/, of what survives a restart
    #[arg(long, default_value = "/var/run/holdfast", env = "HOLDFAST_STATE_DIR")]
    pub state_dir: PathBuf,
    /// Watched directory of policy documents (YAML or JSON)
    #[arg(long, env = "HOLDFAST_POLICY_DIR")]
    pub policy_dir: Option<PathBuf>,
    /// When an endpoint is restricted. An endpoint's own enable-policy goes before it. A pod that is
    /// no endpoint is never restricted
    #[arg(long, value_enum, default_value_t = PolicyMode::Default, env = "HOLDFAST_ENABLE_POLICY")]
    pub enable_policy: PolicyMode,
    /// Name of this node, as CiliumNode documents call it; the host's name unless given
    #[arg(long, value_name = "NAME", env = "HOLDFAST_NODE_NAME")]
    pub node_name: Option<String>,
    /// Watched directory of endpoint documents (YAML or JSON)
    #[arg(long, env = "HOLDFAST_ENDPOINT_DIR")]
    pub endpoint_dir: Option<PathBuf>,
    /// Unix socket that DNS proxies connect to (gRPC)
    #[arg(
        long,
        default_value = "/run/holdfast/sdp.sock",
        env = "HOLDFAST_SDP_SOCKET"
    )]
    pub sdp_socket: PathBuf,
    /// Number of the proxies' group: beside root it may connect to that socket,
    /// read endpoints and identities, and take steering slots
    #[arg(long, value_name = "GID", default_value_t = daemon::unix_socket::PROXY_ID, env = "HOLDFAST_SDP_GROUP")]
    pub sdp_group: u32,
    /// Unix socket of the admin interface (root only)
    #[arg(long, default_value = ADMIN_SOCKET, env = "HOLDFAST_ADMIN_SOCKET")]
    pub admin_socket: PathBuf,
    /// Address of /metrics, /healthz and /readyz; "off" for none
    #[arg(
        long,
        default_value = "127.0.0.1:9962",
        env = "HOLDFAST_METRICS_ADDRESS"
    )]
    pub metrics_address: String,
    /// Port of the DNS proxies on this node
    #[arg(long, default_value_t = 10094, env = "HOLDFAST_TOFQDNS_PROXY_PORT")]
    pub tofqdns_proxy_port: u16,
    /// Leave DNS to standalone proxies altogether
    #[arg(long, default_value_t = false, num_args = 0..=1, default_missing_value = "true",
          require_equals = true, action = ArgAction::Set,
          env = "HOLDFAST_DISABLE_BUILTIN_DNS_PROXY")]
    pub disable_builtin_dns_proxy: bool,
    /// Also serve FQDNData on 127.0.0.1, to any local process: for a holdfast-sdp that cannot reach the native socket. Cilium's own proxy can connect, but gets no queries: it takes no steering slot
    #[arg(long, default_value_t = false, num_args = 0..=1, default_missing_value = "true",
          require_equals = true, action = ArgAction::Set,
          env = "HOLDFAST_ENABLE_STANDALONE_DNS_PROXY")]
    pub enable_standalone_dns_proxy: bool,
    /// Port of FQDNData
    #[arg(
        long,
        default_value_t = 10095,
        env = "HOLDFAST_STANDALONE_DNS_PROXY_SERVER_PORT"
    )]
    pub standalone_dns_proxy_server_port: u16,
    /// Floor of the TTLs of learned addresses
    #[arg(long, value_parser = dns_policy::duration::parse, default_value = "0s", env = "HOLDFAST_TOFQDNS_MIN_TTL")]
    pub tofqdns_min_ttl: Duration,
    /// What the agent's promise to keep an address open lasts beyond its TTL
    #[arg(long, value_parser = dns_policy::duration::parse, default_value = "60s",
          env = "HOLDFAST_MAPPING_LEASE_SLACK")]
    pub mapping_lease_slack: Duration,
    /// Longest that an answer is held until its addresses are open
    #[arg(long, value_parser = dns_policy::duration::parse, default_value = "100ms",
          env = "HOLDFAST_TOFQDNS_PROXY_RESPONSE_MAX_DELAY")]
    pub tofqdns_proxy_response_max_delay: Duration,
    /// How long a connection may be idle before its expired address closes
    #[arg(long, value_parser = dns_policy::duration::parse, default_value = "0s",
          env = "HOLDFAST_TOFQDNS_IDLE_CONNECTION_GRACE_PERIOD")]
    pub tofqdns_idle_connection_grace_period: Duration,
    /// Most addresses kept per name and endpoint
    #[arg(
        long,
        default_value_t = 1000,
        env = "HOLDFAST_TOFQDNS_ENDPOINT_MAX_IP_PER_HOSTNAME"
    )]
    pub tofqdns_endpoint_max_ip_per_hostname: usize,
    /// Most expired addresses kept per endpoint for connections that live on
    #[arg(
        long,
        default_value_t = 10000,
        env = "HOLDFAST_TOFQDNS_MAX_DEFERRED_CONNECTION_DELETES"
    )]
    pub tofqdns_max_deferred_connection_deletes: usize,
    /// File of names and addresses that are known at the start, before anybody asks: a JSON array
    /// as Cilium dumps its DNS cache. What has expired is left out, and what is more than a
    /// sixteenth of the ipcache
    #[arg(long, value_name = "FILE", env = "HOLDFAST_TOFQDNS_PRE_CACHE")]
    pub tofqdns_pre_cache: Option<PathBuf>,
    /// Give each name in policy its identity before an address of it is known
    #[arg(long, default_value_t = true, num_args = 0..=1, default_missing_value = "true",
          require_equals = true, action = ArgAction::Set,
          env = "HOLDFAST_TOFQDNS_PREALLOCATE_IDENTITIES")]
    pub tofqdns_preallocate_identities: bool,
    /// Circuit breaker: once this many combinations of policy's names have an identity, an address
    /// that others share gets the identity of some of them only; "none" for no limit. Identities
    /// of single names do not count
    #[arg(
        long,
        value_name = "IDENTITIES",
        default_value = "8192",
        env = "HOLDFAST_TOFQDNS_MAX_IDENTITIES"
    )]
    pub tofqdns_max_identities: MaxIdentities,
    /// Prefix (or address) whose addresses get no label of a name, whatever answers say, so that the
    /// owner of a name cannot open them (DNS rebinding); may be repeated. toCIDR rules open them as
    /// before. Given prefixes replace the default; "none" refuses nothing, as Cilium does
    #[arg(
        long = "tofqdns-refuse-prefix",
        value_name = "PREFIX",
        value_delimiter = ',',
        default_values = refused::DEFAULT,
        env = "HOLDFAST_TOFQDNS_REFUSE_PREFIX"
    )]
    pub tofqdns_refuse_prefix: Vec<RefusedValue>,
    /// Most server addresses listed per rule in DNSRulesV2 of ep_config.json
    #[arg(
        long,
        default_value_t = 1000,
        env = "HOLDFAST_DNS_MAX_IPS_PER_RESTORED_RULE"
    )]
    pub dns_max_ips_per_restored_rule: usize,
    /// Answer of the built-in proxy to a name that policy forbids; standalone proxies have the same flag
    #[arg(long, value_enum, default_value_t = RejectCode::NameError,
          env = "HOLDFAST_TOFQDNS_DNS_REJECT_RESPONSE_CODE")]
    pub tofqdns_dns_reject_response_code: RejectCode,
    /// Let proxies ask DNS servers in the cluster under the address of the pod that asks: the
    /// datapath then brings the answers to them. For the built-in proxy; standalone ones have the same flag
    #[arg(long, default_value_t = false, num_args = 0..=1, default_missing_value = "true",
          require_equals = true, action = ArgAction::Set,
          env = "HOLDFAST_DNSPROXY_ENABLE_TRANSPARENT_MODE")]
    pub dnsproxy_enable_transparent_mode: bool,
    /// In transparent mode, the built-in proxy asks servers outside of the cluster under the
    /// pod's address, too: no answer comes where the node masquerades pods or translates the
    /// server's address. Standalone proxies have the same flag
    #[arg(long, default_value_t = false, num_args = 0..=1, default_missing_value = "true",
          require_equals = true, action = ArgAction::Set,
          env = "HOLDFAST_TRANSPARENT_MODE_OUTSIDE_CLUSTER")]
    pub transparent_mode_outside_cluster: bool,
    /// Keep the proxy port bound while no proxy runs, so that no other user of the node can bind it
    /// and keep proxies from starting. Proxies must then be started as root (they change their
    /// user themselves); =false for proxies that another user starts
    #[arg(long, default_value_t = true, num_args = 0..=1, default_missing_value = "true",
          require_equals = true, action = ArgAction::Set, env = "HOLDFAST_HOLD_PROXY_PORT")]
    pub hold_proxy_port: bool,
    /// IPv4
    #[arg(long, default_value_t = true, num_args = 0..=1, default_missing_value = "true",
          require_equals = true, action = ArgAction::Set, env = "HOLDFAST_ENABLE_IPV4")]
    pub enable_ipv4: bool,
    /// IPv6
    #[arg(long, default_value_t = true, num_args = 0..=1, default_missing_value = "true",
          require_equals = true, action = ArgAction::Set, env = "HOLDFAST_ENABLE_IPV6")]
    pub enable_ipv6: bool,
    /// How long after a start identities and labels of the run before are kept that nothing
    /// asks for; it counts from when policies and endpoints were read once, none goes before
    #[arg(long, value_parser = dns_policy::duration::parse, default_value = "30s",
          env = "HOLDFAST_IDENTITY_RESTORE_GRACE_PERIOD")]
    pub identity_restore_grace_period: Duration,
    /// Entries of each conntrack map of TCP (1024 to 16777216; Cilium: 524288), of maps that are
    /// not there yet. Each takes about 160 bytes at once
    #[arg(long, value_name = "ENTRIES", default_value_t = MapSizes::default().conntrack_tcp,
          env = "HOLDFAST_BPF_CT_GLOBAL_TCP_MAX")]
    pub bpf_ct_global_tcp_max: u32,
    /// Entries of each conntrack map of everything else (1024 to 16777216; Cilium: 262144), of
    /// maps that are not there yet
    #[arg(long, value_name = "ENTRIES", default_value_t = MapSizes::default().conntrack_any,
          env = "HOLDFAST_BPF_CT_GLOBAL_ANY_MAX")]
    pub bpf_ct_global_any_max: u32,
    /// Prefixes that the ipcache takes (64 to 16777216), if it is not there yet
    #[arg(long, value_name = "ENTRIES", default_value_t = MapSizes::default().ipcache,
          env = "HOLDFAST_BPF_IPCACHE_MAP_MAX")]
    pub bpf_ipcache_map_max: u32,
    /// Addresses of endpoints that cilium_lxc takes (2 to 65535), if it is not there yet
    #[arg(long, value_name = "ENTRIES", default_value_t = MapSizes::default().lxc,
          env = "HOLDFAST_BPF_LXC_MAP_MAX")]
    pub bpf_lxc_map_max: u32,
    /// Entries of each endpoint's policy map (256 to 65536), of maps that are not there yet
    #[arg(long, value_name = "ENTRIES", default_value_t = MapSizes::default().policy,
          env = "HOLDFAST_BPF_POLICY_MAP_MAX")]
    pub bpf_policy_map_max: u32,
    /// Each endpoint's quota of the DNS proxy: datagrams per second; 0 = no limit. A new TCP
    /// connection counts as eight datagrams. A quarter of the quota may come at once. Packets
    /// beyond it are dropped before they reach the proxy's sockets, so that a flood of one pod
    /// costs no other pod a query (`status` and `observe` show them as over_quota)
    #[arg(
        long,
        value_name = "PACKETS",
        default_value_t = 10_000,
        env = "HOLDFAST_ENDPOINT_DNS_QUOTA"
    )]
    pub endpoint_dns_quota: u32,
    /// Between two looks for live connections
    #[arg(long, value_parser = dns_policy::duration::parse, default_value = "30s",
          env = "HOLDFAST_CONNTRACK_GC_INTERVAL")]
    pub conntrack_gc_interval: Duration,
    /// Between two passes that compare the maps with what they should hold. Programs, routes,
    /// steering and pins are checked every two seconds, or as often as this if that is shorter
    #[arg(long, value_parser = dns_policy::duration::parse, default_value = "30s",
          env = "HOLDFAST_RECONCILE_INTERVAL")]
    pub reconcile_interval: Duration,
    /// Log as JSON lines
    #[arg(long, default_value_t = false)]
    pub log_json: bool,
    /// Log filter, for example info or holdfast_agent=debug
    #[arg(long, default_value = "info", env = "HOLDFAST_LOG")]
    pub log: String,
}
