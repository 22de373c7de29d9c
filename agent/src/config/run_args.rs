//! Flags of `holdfast-agent run`, and their help.

use std::{path::PathBuf, time::Duration};

use agent_core::{
    fqdn::{
        refused::{self, RefusedValue},
        servers::NameServers,
    },
    policy::mode::PolicyMode,
};
use agent_datapath::{deny_response::DenyResponses, kernel::MapSizes};
use clap::{ArgAction, Args};
use daemon::{
    command_line::{
        file_args::FileArgs,
        log_args::LogArgs,
        metrics_address::MetricsAddress,
        values::{port, whole},
    },
    flags,
};
use dns_policy::{duration, reject_code::RejectCode};

use super::{
    AllocationArgs, MaxIdentities, args::ADMIN_SOCKET, cluster_args::ClusterArgs,
    cni_args::CniArgs, container_args::ContainerArgs, existing_dir::existing_dir,
    firewall_args::FirewallArgs, high_scale_args::HighScaleArgs, relay_args::FollowArgs,
    resolver_args::ResolverArgs, standby_args::StandbyArgs,
};

/// `run`
#[derive(Clone, Debug, Args)]
#[command(mut_args = flags::complete)]
pub struct RunArgs {
    /// Directory on a BPF file system that has the agent's pins, in tc/globals/; a second agent needs one of its own
    #[arg(long, value_name = "DIR", default_value = shared_maps::pin::BPF_ROOT)]
    pub bpf_root: PathBuf,
    /// Directory of the agent's state: a restart restores endpoints, identities and names from its state/
    #[arg(long, value_name = "DIR", default_value = "/var/run/holdfast")]
    pub state_dir: PathBuf,
    /// Directory of policy documents (YAML or JSON); the agent applies every change in it
    #[arg(long, value_name = "DIR", value_parser = existing_dir())]
    pub policy_dir: Option<PathBuf>,
    /// When an endpoint is restricted. An endpoint's own enable-policy overrides it. A pod that is
    /// not an endpoint is never restricted
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = PolicyMode::Default)]
    pub enable_policy: PolicyMode,
    #[command(flatten)]
    pub cluster: ClusterArgs,
    #[command(flatten)]
    pub follow: FollowArgs,
    #[command(flatten)]
    pub firewalls: FirewallArgs,
    #[command(flatten)]
    pub resolver: ResolverArgs,
    #[command(flatten)]
    pub cni: CniArgs,
    #[command(flatten)]
    pub containers: ContainerArgs,
    /// Directory of endpoint documents (YAML or JSON); the agent applies every change in it
    #[arg(long, value_name = "DIR", value_parser = existing_dir())]
    pub endpoint_dir: Option<PathBuf>,
    /// Directory in which the agent stores the endpoints that `endpoint add` added, one file each. It must survive a boot, so that the agent finds the endpoints again when --state-dir is empty
    #[arg(
        long,
        value_name = "DIR",
        default_value = "/var/lib/holdfast/endpoints"
    )]
    pub endpoint_store: PathBuf,
    /// Unix socket to which DNS proxies connect (gRPC)
    #[arg(long, value_name = "PATH", default_value = "/run/holdfast/sdp.sock")]
    pub sdp_socket: PathBuf,
    /// Group id of the DNS proxies: processes of this group (and root) may connect to
    /// --sdp-socket, read endpoints and identities, and use steering slots
    #[arg(long, value_name = "GID", value_parser = whole(0..=u32::MAX), default_value_t = daemon::unix_socket::PROXY_ID)]
    pub sdp_group: u32,
    /// Unix socket through which commands reach the running program; only root can connect to it
    #[arg(long, value_name = "PATH", default_value = ADMIN_SOCKET)]
    pub admin_socket: PathBuf,
    /// Address of /metrics, /healthz and /readyz: HOST:PORT, :PORT for every address of the node, or off
    #[arg(long, value_name = "[HOST]:PORT", default_value = "127.0.0.1:9962")]
    pub metrics_address: MetricsAddress,
    /// Port on which the DNS proxies of this node listen, on 127.0.0.1 and ::1; agent and proxies must have the same setting
    #[arg(long, value_name = "PORT", value_parser = port, default_value_t = 10094)]
    pub tofqdns_proxy_port: u16,
    /// Run no built-in DNS proxy: DNS then needs a running holdfast-sdp
    #[arg(long, default_value_t = false, action = ArgAction::Set)]
    pub disable_builtin_dns_proxy: bool,
    /// Also serve FQDNData on 127.0.0.1, to every local process; for a holdfast-sdp that cannot reach the native socket. Cilium's own proxy can connect, but it uses no steering slot and so gets no queries
    #[arg(long, default_value_t = false, action = ArgAction::Set)]
    pub enable_standalone_dns_proxy: bool,
    /// Port of the agent's FQDNData service on 127.0.0.1; 0 is none
    #[arg(long, value_name = "PORT", value_parser = whole(0..=u16::MAX), default_value_t = 10095)]
    pub standalone_dns_proxy_server_port: u16,
    /// Shortest time for which a learned address is valid, whatever its TTL
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "0s")]
    pub tofqdns_min_ttl: Duration,
    /// Time after its TTL until which the agent promises a proxy to keep an address open (the lease)
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "60s")]
    pub mapping_lease_slack: Duration,
    /// Longest time that a DNS proxy holds an answer until its addresses are open; then the client gets it anyway. This flag is for the built-in proxy; standalone proxies have the same one
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "100ms")]
    pub tofqdns_proxy_response_max_delay: Duration,
    /// How long a connection may be idle before its expired address is closed
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "0s")]
    pub tofqdns_idle_connection_grace_period: Duration,
    /// Most addresses kept for one name and endpoint
    #[arg(long, value_name = "N", value_parser = whole(0..=usize::MAX), default_value_t = 1000)]
    pub tofqdns_endpoint_max_ip_per_hostname: usize,
    /// Most expired addresses kept for one endpoint because connections still use them
    #[arg(long, value_name = "N", value_parser = whole(0..=usize::MAX), default_value_t = 10000)]
    pub tofqdns_max_deferred_connection_deletes: usize,
    /// File of names and addresses that are open from the start, before a pod looks them up: a
    /// JSON array in the format of Cilium's DNS cache. Expired entries are skipped. The entries
    /// use at most 1/16 of the ipcache; `status` shows how many more were skipped
    #[arg(long, value_name = "FILE")]
    pub tofqdns_pre_cache: Option<PathBuf>,
    /// Allocate an identity for each name in a policy before its first address is learned
    #[arg(long, default_value_t = true, action = ArgAction::Set)]
    pub tofqdns_preallocate_identities: bool,
    /// Circuit breaker: most identities for combinations of names. After that, an address that
    /// several names share gets the identity of some of them only; "none" is no limit. Identities
    /// of single names do not count
    #[arg(long, value_name = "IDENTITIES", default_value = "8192")]
    pub tofqdns_max_identities: MaxIdentities,
    /// Prefix or address that a DNS answer never opens, so that the owner of a name cannot open
    /// addresses of the node (DNS rebinding); may be repeated. toCIDR rules can still open it.
    /// Given prefixes replace the default; "none" refuses no prefix, as Cilium does
    #[arg(
        long = "tofqdns-refuse-prefix",
        value_name = "PREFIX",
        value_delimiter = ',',
        default_values = refused::DEFAULT
    )]
    pub tofqdns_refuse_prefix: Vec<RefusedValue>,
    /// DNS servers whose answers count for toFQDNs rules
    #[arg(long, value_name = "WHICH", value_enum, default_value_t = NameServers::Any)]
    pub tofqdns_servers: NameServers,
    /// Most server addresses in one rule of DNSRulesV2 in ep_config.json
    #[arg(long, value_name = "N", value_parser = whole(0..=usize::MAX), default_value_t = 1000)]
    pub dns_max_ips_per_restored_rule: usize,
    /// Answer to a name that policy denies. This flag is for the built-in proxy; standalone proxies have the same one
    #[arg(long, value_name = "HOW", value_enum, ignore_case = true, default_value_t = RejectCode::NameError)]
    pub tofqdns_dns_reject_response_code: RejectCode,
    /// Transparent mode: proxies forward queries to DNS servers in the cluster with the pod's
    /// address as the source, not the node's; agent and proxies must have the same setting
    #[arg(long, default_value_t = false, action = ArgAction::Set)]
    pub dnsproxy_enable_transparent_mode: bool,
    /// Attach programs by TCX links where the kernel has them (Linux 6.6). "false": by filters of
    /// traffic control, as on older kernels
    #[arg(long, default_value_t = true, action = ArgAction::Set)]
    pub enable_tcx: bool,
    /// In transparent mode, use the pod's address also for servers outside of the cluster; their
    /// answers are lost if the node masquerades pods or translates the server's address. This flag
    /// is for the built-in proxy; standalone proxies have the same one
    #[arg(long, default_value_t = false, action = ArgAction::Set)]
    pub transparent_mode_outside_cluster: bool,
    /// Keep the proxy port bound while no proxy runs. Otherwise another user of the node could
    /// bind it, and proxies could not start. Proxies must then be started as root (they change
    /// their user themselves); set =false if another user starts them
    #[arg(long, default_value_t = true, action = ArgAction::Set)]
    pub hold_proxy_port: bool,
    /// Serve IPv4: policy of pods, and their DNS queries
    #[arg(long, default_value_t = true, action = ArgAction::Set)]
    pub enable_ipv4: bool,
    /// Serve IPv6: policy of pods, and their DNS queries
    #[arg(long, default_value_t = true, action = ArgAction::Set)]
    pub enable_ipv6: bool,
    /// How long after a start the agent keeps identities and labels of its previous run that no
    /// policy or endpoint uses; the time starts after policies and endpoints were first read
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "30s")]
    pub identity_restore_grace_period: Duration,
    #[command(flatten)]
    pub standby: StandbyArgs,
    #[command(flatten)]
    pub identities: AllocationArgs,
    #[command(flatten)]
    pub map_sizes: MapSizes,
    /// Datagrams per second that each endpoint may send to the DNS proxy; 0 is no limit. A new TCP
    /// connection counts as eight datagrams. A burst may be a quarter of the quota. The datapath
    /// drops further packets before they reach the proxy's sockets, so that a flood from one pod
    /// costs no other pod a query (`status` and `observe` show them as over_quota)
    #[arg(long, value_name = "PACKETS", value_parser = whole(0..=u32::MAX), default_value_t = 10_000)]
    pub endpoint_dns_quota: u32,
    #[command(flatten)]
    pub deny: DenyResponses,
    #[command(flatten)]
    pub high_scale: HighScaleArgs,
    /// Time between two scans of the conntrack maps for live connections
    #[arg(long, value_name = "TIME", value_parser = interval, default_value = "30s")]
    pub conntrack_gc_interval: Duration,
    /// Time between two runs of the reconciler, which compares the maps with the model. Programs,
    /// routes, steering and pins are checked every two seconds, or at this interval if it is shorter
    #[arg(long, value_name = "TIME", value_parser = interval, default_value = "30s")]
    pub reconcile_interval: Duration,
    #[command(flatten)]
    pub files: FileArgs,
    #[command(flatten)]
    pub log: LogArgs,
}

fn interval(text: &str) -> Result<Duration, String> {
    match duration::parse(text) {
        Ok(interval) if interval < Duration::from_millis(10) => {
            Err("must be at least 10ms".to_owned())
        }
        parsed => parsed.map_err(|error| error.to_string()),
    }
}
