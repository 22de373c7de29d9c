//! What the agent was asked to do: its settings, from flags and environment that are checked once.

pub mod args;
mod cluster_args;
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

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use agent_cluster::{ApiSettings, relay_settings::RelaySettings};
use agent_core::{
    fqdn::{refused::RefusedPrefixes, servers::NameServers},
    kubernetes::{external_ips::ExternalIps, labels::LabelRule},
    policy::mode::PolicyMode,
};
use agent_datapath::{deny_response::DenyResponses, kernel::MapSizes};
use dns_policy::reject_code::RejectCode;
use ipnet::IpNet;

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
    /// Further addresses of Services: (address, `namespace/name`).
    pub service_aliases: Vec<(IpAddr, String)>,
    /// DNS servers that are trusted for names; empty = those of `dns_service`.
    pub dns_servers: Vec<SocketAddr>,
    /// Those of `dns_service` are trusted beside them.
    pub with_dns_service: bool,
    /// DNS servers whose answers count for toFQDNs.
    pub name_servers: NameServers,
    /// The cluster's DNS Service, as `namespace/name`.
    pub dns_service: String,
    /// Whether `spec.externalIPs` of Services count.
    pub external_ips: ExternalIps,
    /// Blocks of the cluster's pods and Services.
    pub cluster_blocks: Vec<IpNet>,
    /// Blocks of Services are given.
    pub has_service_blocks: bool,
    /// Blocks of the cluster's pods, which `cluster_blocks` contains, too.
    pub pod_blocks: Vec<IpNet>,
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
    /// Port that DNS queries are redirected to.
    pub proxy_port: u16,
    /// No DNS proxy in this process.
    pub disable_builtin_dns_proxy: bool,
    /// Port of FQDNData on 127.0.0.1; `None` = off.
    pub fqdndata_port: Option<u16>,
    /// File of names that are known before anybody asks.
    pub pre_cache: Option<PathBuf>,
    /// Shortest time for which a learned address is valid, whatever its TTL.
    pub min_ttl: Duration,
    /// What a lease lasts beyond lookup + TTL.
    pub lease_slack: Duration,
    /// Longest that an answer is held until its addresses are plumbed.
    pub response_max_delay: Duration,
    /// How long a connection may idle before its expired address goes.
    pub idle_connection_grace: Duration,
    /// Most addresses kept per name and endpoint.
    pub max_ips_per_hostname: usize,
    /// Most expired addresses kept per endpoint for live connections.
    pub max_deferred_connection_deletes: usize,
    /// Code for names that are not allowed.
    pub reject_code: RejectCode,
    /// Proxies ask servers under pods' addresses.
    pub transparent: bool,
    /// Whether programs are attached by TCX links where the kernel has them.
    pub tcx: bool,
    /// Those outside of the cluster, too (the built-in proxy).
    pub transparent_outside: bool,
    pub enable_policy: PolicyMode,
    /// Keep the proxy port bound while no proxy runs.
    pub hold_proxy_port: bool,
    pub ipv4: bool,
    pub ipv6: bool,
    /// Give FQDN selectors their identity before an address is known.
    pub preallocate_identities: bool,
    /// Most combinations of names that answers may give an identity; none = any number.
    pub max_fqdn_identities: Option<usize>,
    /// Prefixes whose addresses get no label of a name.
    pub refused_prefixes: RefusedPrefixes,
    /// Most server addresses listed per restored rule.
    pub max_ips_per_restored_rule: usize,
    /// How long after the first sync restored identities are kept that nothing asks for.
    pub identity_restore_grace: Duration,
    /// Sizes of maps that are not there yet.
    pub map_sizes: MapSizes,
    /// Datagrams and new connections per second that each endpoint may send to the DNS proxy;
    /// 0 = any number.
    pub dns_quota: u32,
    /// Replies to packets that egress policy denies.
    pub deny_responses: DenyResponses,
    /// Between two looks into the conntrack maps.
    pub conntrack_gc_interval: Duration,
    /// Between two passes that compare the maps with what they should hold.
    pub reconcile_interval: Duration,
}

impl Config {
    /// Directory of the per-endpoint directories and checkpoints.
    pub fn state(&self) -> PathBuf {
        self.state_dir.join("state")
    }

    /// [`Config::min_ttl`] in whole seconds, as TTLs are given: rounded up.
    pub fn min_ttl_seconds(&self) -> u32 {
        whole_seconds(self.min_ttl)
    }
}

fn whole_seconds(duration: Duration) -> u32 {
    let rest = u64::from(duration.subsec_nanos() > 0);
    u32::try_from(duration.as_secs().saturating_add(rest)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_floor_is_rounded_up_to_seconds() {
        assert_eq!(whole_seconds(Duration::ZERO), 0);
        assert_eq!(whole_seconds(Duration::from_millis(500)), 1);
        assert_eq!(whole_seconds(Duration::from_secs(300)), 300);
        assert_eq!(whole_seconds(Duration::MAX), u32::MAX);
    }
}
