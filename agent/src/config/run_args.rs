//! Flags of `holdfast-agent run`, and their help.

use std::{path::PathBuf, time::Duration};

use agent_core::{
    fqdn::{
        refused::{self, RefusedValue},
        servers::NameServers,
    },
    policy::mode::PolicyMode,
};
use agent_datapath::kernel::MapSizes;
use clap::{ArgAction, Args};
use dns_policy::{duration, reject_code::RejectCode};

use super::{
    MaxIdentities, args::ADMIN_SOCKET, cluster_args::ClusterArgs, cni_args::CniArgs,
    deny_args::DenyArgs, firewall_args::FirewallArgs, relay_args::FollowArgs,
    resolver_args::ResolverArgs,
};

/// `run`
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Directory on a BPF file system for all pins; a second agent needs a directory of its own
    #[arg(long, default_value = shared_maps::pin::BPF_ROOT, env = "HOLDFAST_BPF_ROOT")]
    pub bpf_root: PathBuf,
    /// Directory of the agent's lock file; its state/ has the files from which a restart restores endpoints, identities and names
    #[arg(long, default_value = "/var/run/holdfast", env = "HOLDFAST_STATE_DIR")]
    pub state_dir: PathBuf,
    /// Directory of policy documents (YAML or JSON); the agent applies every change in it
    #[arg(long, env = "HOLDFAST_POLICY_DIR")]
    pub policy_dir: Option<PathBuf>,
    /// When an endpoint is restricted. An endpoint's own enable-policy overrides it. A pod that is
    /// not an endpoint is never restricted
    #[arg(long, value_enum, default_value_t = PolicyMode::Default, env = "HOLDFAST_ENABLE_POLICY")]
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
    /// Directory of endpoint documents (YAML or JSON); the agent applies every change in it
    #[arg(long, env = "HOLDFAST_ENDPOINT_DIR")]
    pub endpoint_dir: Option<PathBuf>,
    /// Directory in which the agent stores the endpoints that `endpoint add` added, one file each. It must survive a boot, so that the agent finds the endpoints again when --state-dir is empty
    #[arg(
        long,
        value_name = "DIR",
        default_value = "/var/lib/holdfast/endpoints",
        env = "HOLDFAST_ENDPOINT_STORE"
    )]
    pub endpoint_store: PathBuf,
    /// Unix socket to which DNS proxies connect (gRPC)
    #[arg(
        long,
        default_value = "/run/holdfast/sdp.sock",
        env = "HOLDFAST_SDP_SOCKET"
    )]
    pub sdp_socket: PathBuf,
    /// Group id of the DNS proxies: processes of this group (and root) may connect to
    /// --sdp-socket, read endpoints and identities, and use steering slots
    #[arg(long, value_name = "GID", default_value_t = daemon::unix_socket::PROXY_ID, env = "HOLDFAST_SDP_GROUP")]
    pub sdp_group: u32,
    /// Unix socket of the admin interface; only root can connect to it
    #[arg(long, default_value = ADMIN_SOCKET, env = "HOLDFAST_ADMIN_SOCKET")]
    pub admin_socket: PathBuf,
    /// Address of /metrics, /healthz and /readyz; "off" for none
    #[arg(
        long,
        default_value = "127.0.0.1:9962",
        env = "HOLDFAST_METRICS_ADDRESS"
    )]
    pub metrics_address: String,
    /// Port on which the DNS proxies of this node listen; they must have the same setting
    #[arg(long, default_value_t = 10094, env = "HOLDFAST_TOFQDNS_PROXY_PORT")]
    pub tofqdns_proxy_port: u16,
    /// Run no built-in DNS proxy: DNS then needs a running holdfast-sdp
    #[arg(long, default_value_t = false, num_args = 0..=1, default_missing_value = "true",
          require_equals = true, action = ArgAction::Set,
          env = "HOLDFAST_DISABLE_BUILTIN_DNS_PROXY")]
    pub disable_builtin_dns_proxy: bool,
    /// Also serve FQDNData on 127.0.0.1, to every local process; for a holdfast-sdp that cannot reach the native socket. Cilium's own proxy can connect, but it uses no steering slot and so gets no queries
    #[arg(long, default_value_t = false, num_args = 0..=1, default_missing_value = "true",
          require_equals = true, action = ArgAction::Set,
          env = "HOLDFAST_ENABLE_STANDALONE_DNS_PROXY")]
    pub enable_standalone_dns_proxy: bool,
    /// Port of the FQDNData service
    #[arg(
        long,
        default_value_t = 10095,
        env = "HOLDFAST_STANDALONE_DNS_PROXY_SERVER_PORT"
    )]
    pub standalone_dns_proxy_server_port: u16,
    /// Shortest time for which a learned address is valid, whatever its TTL
    #[arg(long, value_parser = duration::parse, default_value = "0s", env = "HOLDFAST_TOFQDNS_MIN_TTL")]
    pub tofqdns_min_ttl: Duration,
    /// Time after its TTL until which the agent promises a proxy to keep an address open (the lease)
    #[arg(long, value_parser = duration::parse, default_value = "60s",
          env = "HOLDFAST_MAPPING_LEASE_SLACK")]
    pub mapping_lease_slack: Duration,
    /// Longest time that the built-in proxy holds an answer until its addresses are open; then the client gets it anyway
    #[arg(long, value_parser = duration::parse, default_value = "100ms",
          env = "HOLDFAST_TOFQDNS_PROXY_RESPONSE_MAX_DELAY")]
    pub tofqdns_proxy_response_max_delay: Duration,
    /// How long a connection may be idle before its expired address is closed
    #[arg(long, value_parser = duration::parse, default_value = "0s",
          env = "HOLDFAST_TOFQDNS_IDLE_CONNECTION_GRACE_PERIOD")]
    pub tofqdns_idle_connection_grace_period: Duration,
    /// Most addresses kept for one name and endpoint
    #[arg(
        long,
        default_value_t = 1000,
        env = "HOLDFAST_TOFQDNS_ENDPOINT_MAX_IP_PER_HOSTNAME"
    )]
    pub tofqdns_endpoint_max_ip_per_hostname: usize,
    /// Most expired addresses kept for one endpoint because connections still use them
    #[arg(
        long,
        default_value_t = 10000,
        env = "HOLDFAST_TOFQDNS_MAX_DEFERRED_CONNECTION_DELETES"
    )]
    pub tofqdns_max_deferred_connection_deletes: usize,
    /// File of names and addresses that are open from the start, before a pod looks them up: a
    /// JSON array in the format of Cilium's DNS cache. Expired entries are skipped. The entries
    /// use at most 1/16 of the ipcache; `status` shows how many more were skipped
    #[arg(long, value_name = "FILE", env = "HOLDFAST_TOFQDNS_PRE_CACHE")]
    pub tofqdns_pre_cache: Option<PathBuf>,
    /// Allocate an identity for each name in a policy before its first address is learned
    #[arg(long, default_value_t = true, num_args = 0..=1, default_missing_value = "true",
          require_equals = true, action = ArgAction::Set,
          env = "HOLDFAST_TOFQDNS_PREALLOCATE_IDENTITIES")]
    pub tofqdns_preallocate_identities: bool,
    /// Circuit breaker: most identities for combinations of names. After that, an address that
    /// several names share gets the identity of some of them only; "none" is no limit. Identities
    /// of single names do not count
    #[arg(
        long,
        value_name = "IDENTITIES",
        default_value = "8192",
        env = "HOLDFAST_TOFQDNS_MAX_IDENTITIES"
    )]
    pub tofqdns_max_identities: MaxIdentities,
    /// Prefix or address that a DNS answer never opens, so that the owner of a name cannot open
    /// addresses of the node (DNS rebinding); may be repeated. toCIDR rules can still open it.
    /// Given prefixes replace the default; "none" refuses no prefix, as Cilium does
    #[arg(
        long = "tofqdns-refuse-prefix",
        value_name = "PREFIX",
        value_delimiter = ',',
        default_values = refused::DEFAULT,
        env = "HOLDFAST_TOFQDNS_REFUSE_PREFIX"
    )]
    pub tofqdns_refuse_prefix: Vec<RefusedValue>,
    /// DNS servers whose answers count for toFQDNs rules
    #[arg(long, value_enum, default_value_t = NameServers::Any, env = "HOLDFAST_TOFQDNS_SERVERS")]
    pub tofqdns_servers: NameServers,
    /// Most server addresses in one rule of DNSRulesV2 in ep_config.json
    #[arg(
        long,
        default_value_t = 1000,
        env = "HOLDFAST_DNS_MAX_IPS_PER_RESTORED_RULE"
    )]
    pub dns_max_ips_per_restored_rule: usize,
    /// Answer of the built-in proxy to a name that policy denies; standalone proxies have the same flag
    #[arg(long, value_enum, default_value_t = RejectCode::NameError,
          env = "HOLDFAST_TOFQDNS_DNS_REJECT_RESPONSE_CODE")]
    pub tofqdns_dns_reject_response_code: RejectCode,
    /// Transparent mode: proxies forward queries to DNS servers in the cluster with the pod's
    /// address as the source, and the datapath returns the answers to the proxy. This flag is for
    /// the built-in proxy; standalone proxies have the same flag
    #[arg(long, default_value_t = false, num_args = 0..=1, default_missing_value = "true",
          require_equals = true, action = ArgAction::Set,
          env = "HOLDFAST_DNSPROXY_ENABLE_TRANSPARENT_MODE")]
    pub dnsproxy_enable_transparent_mode: bool,
    /// Attach programs by TCX links where the kernel has them (Linux 6.6). "false": by filters of
    /// traffic control, as on older kernels
    #[arg(long, default_value_t = true, num_args = 0..=1, default_missing_value = "true",
          require_equals = true, action = ArgAction::Set,
          env = "HOLDFAST_ENABLE_TCX")]
    pub enable_tcx: bool,
    /// In transparent mode, the built-in proxy uses the pod's address also for servers outside of
    /// the cluster; their answers are lost if the node masquerades pods or translates the
    /// server's address. Standalone proxies have the same flag
    #[arg(long, default_value_t = false, num_args = 0..=1, default_missing_value = "true",
          require_equals = true, action = ArgAction::Set,
          env = "HOLDFAST_TRANSPARENT_MODE_OUTSIDE_CLUSTER")]
    pub transparent_mode_outside_cluster: bool,
    /// Keep the proxy port bound while no proxy runs. Otherwise another user of the node could
    /// bind it, and proxies could not start. Proxies must then be started as root (they change
    /// their user themselves); set =false if another user starts them
    #[arg(long, default_value_t = true, num_args = 0..=1, default_missing_value = "true",
          require_equals = true, action = ArgAction::Set, env = "HOLDFAST_HOLD_PROXY_PORT")]
    pub hold_proxy_port: bool,
    /// Enforce policy for IPv4
    #[arg(long, default_value_t = true, num_args = 0..=1, default_missing_value = "true",
          require_equals = true, action = ArgAction::Set, env = "HOLDFAST_ENABLE_IPV4")]
    pub enable_ipv4: bool,
    /// Enforce policy for IPv6
    #[arg(long, default_value_t = true, num_args = 0..=1, default_missing_value = "true",
          require_equals = true, action = ArgAction::Set, env = "HOLDFAST_ENABLE_IPV6")]
    pub enable_ipv6: bool,
    /// How long after a start the agent keeps identities and labels of its previous run that no
    /// policy or endpoint uses; the time starts after policies and endpoints were first read
    #[arg(long, value_parser = duration::parse, default_value = "30s",
          env = "HOLDFAST_IDENTITY_RESTORE_GRACE_PERIOD")]
    pub identity_restore_grace_period: Duration,
    /// Entries of each conntrack map for TCP (1024 to 16777216; Cilium: 524288). It applies when
    /// the map is created. Each entry uses about 160 bytes of memory from the start
    #[arg(long, value_name = "ENTRIES", default_value_t = MapSizes::default().conntrack_tcp,
          env = "HOLDFAST_BPF_CT_GLOBAL_TCP_MAX")]
    pub bpf_ct_global_tcp_max: u32,
    /// Entries of each conntrack map for other protocols (1024 to 16777216; Cilium: 262144). It
    /// applies when the map is created
    #[arg(long, value_name = "ENTRIES", default_value_t = MapSizes::default().conntrack_any,
          env = "HOLDFAST_BPF_CT_GLOBAL_ANY_MAX")]
    pub bpf_ct_global_any_max: u32,
    /// Entries of the ipcache (64 to 16777216), one for each prefix. It applies when the map is created
    #[arg(long, value_name = "ENTRIES", default_value_t = MapSizes::default().ipcache,
          env = "HOLDFAST_BPF_IPCACHE_MAP_MAX")]
    pub bpf_ipcache_map_max: u32,
    /// Entries of cilium_lxc (2 to 65535), one for each address of an endpoint. It applies when the map is created
    #[arg(long, value_name = "ENTRIES", default_value_t = MapSizes::default().lxc,
          env = "HOLDFAST_BPF_LXC_MAP_MAX")]
    pub bpf_lxc_map_max: u32,
    /// Entries of each endpoint's policy map (256 to 65536). It applies when the map is created
    #[arg(long, value_name = "ENTRIES", default_value_t = MapSizes::default().policy,
          env = "HOLDFAST_BPF_POLICY_MAP_MAX")]
    pub bpf_policy_map_max: u32,
    /// Datagrams per second that each endpoint may send to the DNS proxy; 0 is no limit. A new TCP
    /// connection counts as eight datagrams. A burst may be a quarter of the quota. The datapath
    /// drops further packets before they reach the proxy's sockets, so that a flood from one pod
    /// costs no other pod a query (`status` and `observe` show them as over_quota)
    #[arg(
        long,
        value_name = "PACKETS",
        default_value_t = 10_000,
        env = "HOLDFAST_ENDPOINT_DNS_QUOTA"
    )]
    pub endpoint_dns_quota: u32,
    #[command(flatten)]
    pub deny: DenyArgs,
    /// Time between two scans of the conntrack maps for live connections
    #[arg(long, value_parser = duration::parse, default_value = "30s",
          env = "HOLDFAST_CONNTRACK_GC_INTERVAL")]
    pub conntrack_gc_interval: Duration,
    /// Time between two runs of the reconciler, which compares the maps with the model. Programs,
    /// routes, steering and pins are checked every two seconds, or at this interval if it is shorter
    #[arg(long, value_parser = duration::parse, default_value = "30s", env = "HOLDFAST_RECONCILE_INTERVAL")]
    pub reconcile_interval: Duration,
    /// Directory with one file per flag of this command, named without dashes, such as a mounted
    /// ConfigMap. Flags and environment override it. Unknown keys are ignored and listed in the log
    #[arg(long, value_name = "DIR", env = "HOLDFAST_CONFIG_DIR")]
    pub config_dir: Option<PathBuf>,
    /// Log as JSON lines
    #[arg(long, default_value_t = false)]
    pub log_json: bool,
    /// Lowest severity that is logged: error, warn, info, debug, trace or off. Modules may have their
    /// own, for example info,holdfast_agent=debug
    #[arg(long, default_value = "info", env = "HOLDFAST_LOG")]
    pub log: String,
}
