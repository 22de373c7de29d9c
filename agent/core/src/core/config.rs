//! What the core is given at its start.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use dns_policy::boot_time::BootTime;
use ipnet::IpNet;
use shared_maps::{
    EndpointId, IdentityId,
    ipcache::{IpcacheKey, IpcacheValue},
    lxc::{LxcKey, LxcValue},
    policy::{PolicyKey, PolicyValue},
};

use crate::{
    endpoint::config_file::EndpointFile,
    fqdn::{
        cleaned::CleanedNames, pre_cache::PreCached, refused::RefusedPrefixes, servers::NameServers,
    },
    high_scale::scope::PodScope,
    identity::cluster::IdentityRange,
    ipcache::resolve::whole_families,
    kubernetes::external_ips::ExternalIps,
    labels::LabelSet,
    policy::mode::PolicyMode,
    tunnel_mode::TunnelMode,
};

/// The usual DNS Service, whose addresses NodeLocal DNSCache serves.
pub const DNS_SERVICE: &str = "kube-system/kube-dns";

/// Settings of the core. [`CoreConfig::default`] holds the product's defaults.
#[derive(Clone, Debug)]
pub struct CoreConfig {
    /// Boot id of the machine (`/proc/sys/kernel/random/boot_id`).
    pub boot_id: String,
    /// Counts the agent's starts since boot.
    pub start: u64,
    /// Unix time at CLOCK_BOOTTIME 0, nanoseconds: files carry wall time.
    pub boot_unix_ns: u64,
    /// Name of this node, as objects of the cluster call it.
    pub node_name: Option<String>,
    /// Blocks of the cluster's pods and Services: an address there of which nothing else is known is
    /// unmanaged, not the world.
    pub cluster_blocks: Vec<IpNet>,
    /// Blocks of pods; empty if they are unknown.
    pub pod_blocks: Vec<IpNet>,
    /// Addresses beside those of its document that a Service has: (address, `namespace/name`).
    pub service_aliases: Vec<(IpAddr, String)>,
    /// DNS servers that are trusted for names; empty = those of `dns_service`.
    pub dns_servers: Vec<SocketAddr>,
    /// The DNS servers of `dns_service` are trusted too.
    pub with_dns_service: bool,
    /// DNS servers whose answers count for `toFQDNs`.
    pub name_servers: NameServers,
    /// The Service of the cluster's DNS servers, `namespace/name`.
    pub dns_service: String,
    /// Label sets of pods have numbers of the cluster, and objects with a number of this range are to be made
    /// for those that have none. None: this node gives numbers, except for those of documents.
    pub cluster_identities: Option<IdentityRange>,
    /// Part of the node in the tunnel between nodes; none: packets carry no identity.
    pub high_scale: Option<TunnelMode>,
    /// Pods of the cluster that are read.
    pub pods: PodScope,
    /// Whether `spec.externalIPs` of Services count.
    pub external_ips: ExternalIps,
    /// Port of the DNS proxy.
    pub proxy_port: u16,
    /// When endpoints without a mode of their own are restricted.
    pub enable_policy: PolicyMode,
    pub enable_ipv4: bool,
    pub enable_ipv6: bool,
    /// Floor of every TTL, seconds.
    pub min_ttl: u32,
    /// What a lease lasts beyond the TTL.
    pub lease_slack: Duration,
    /// Addresses an endpoint may hold per name before the soonest-expiring become zombies.
    pub max_ips_per_name: usize,
    /// Pairs (name, address) an endpoint may hold, valid or as zombies; new ones beyond that
    /// are refused. It bounds names too: each has an address.
    pub max_pairs_per_endpoint: usize,
    /// Zombies an endpoint may have; 0 = expired addresses go at once.
    pub max_deferred_deletes: usize,
    /// How long an idle connection counts as alive.
    pub idle_grace: Duration,
    /// How long restored identities and labels are held after the first sync.
    pub restore_grace: Duration,
    /// Entries a policy map takes.
    pub policy_map_max: usize,
    pub ipcache_max: usize,
    /// Give every FQDN selector its identity before any address is known.
    pub preallocate_identities: bool,
    /// Most combinations of fqdn labels that answers may give an identity; none = no circuit
    /// breaker.
    pub max_fqdn_identities: Option<usize>,
    /// Prefixes whose addresses get no label of a name.
    pub refused_prefixes: RefusedPrefixes,
    /// Addresses in mappings per second that one stream may send on average; ten times as
    /// many at once.
    pub mapping_rate: u32,
    /// Files are written for names alone while the core goes on ([`Step::KeepNames`]): a slow
    /// disk holds no answer up.
    ///
    /// [`Step::KeepNames`]: crate::datapath::plan::Step::KeepNames
    pub names_kept_later: bool,
    /// Addresses listed per selector in the restored rules of `ep_config.json`.
    pub max_ips_per_restored_rule: usize,
    /// What one part of a change of policy may cost, in units of some ten microseconds: so long
    /// an answer may wait for it.
    pub work_budget: usize,
    /// Between two passes that compare the datapath with the model.
    pub reconcile_interval: Duration,
}

impl CoreConfig {
    /// All addresses of each family that is enabled.
    pub(crate) fn whole_families(&self) -> impl Iterator<Item = IpNet> + use<> {
        let enabled = [self.enable_ipv4, self.enable_ipv6];
        let families = whole_families().into_iter().zip(enabled);
        families.filter_map(|(all, is_enabled)| is_enabled.then_some(all))
    }
}

impl Default for CoreConfig {
    fn default() -> Self {
        Self {
            boot_id: String::new(),
            start: 1,
            boot_unix_ns: 0,
            node_name: None,
            cluster_blocks: Vec::new(),
            pod_blocks: Vec::new(),
            service_aliases: Vec::new(),
            dns_servers: Vec::new(),
            with_dns_service: false,
            name_servers: NameServers::Any,
            dns_service: DNS_SERVICE.to_owned(),
            cluster_identities: None,
            high_scale: None,
            pods: PodScope::All,
            external_ips: ExternalIps::Judge,
            proxy_port: 10094,
            enable_policy: PolicyMode::Default,
            enable_ipv4: true,
            enable_ipv6: true,
            min_ttl: 0,
            lease_slack: Duration::from_secs(60),
            max_ips_per_name: 1000,
            max_pairs_per_endpoint: 50_000,
            max_deferred_deletes: 10_000,
            idle_grace: Duration::ZERO,
            restore_grace: Duration::from_secs(30),
            policy_map_max: shared_maps::policy::MAX_ENTRIES as usize,
            ipcache_max: shared_maps::ipcache::MAX_ENTRIES as usize,
            preallocate_identities: true,
            max_fqdn_identities: Some(8192),
            refused_prefixes: RefusedPrefixes::default(),
            mapping_rate: 20_000,
            names_kept_later: false,
            max_ips_per_restored_rule: 1000,
            work_budget: 500,
            reconcile_interval: Duration::from_secs(30),
        }
    }
}

/// What an earlier run left behind, parsed.
#[derive(Clone, Debug, Default)]
pub struct Restored {
    /// When the state was read.
    pub now: BootTime,
    /// Content of `local_allocator_state.json`, as `identity::checkpoint::parse_local` reads it.
    pub local_identities: Vec<(IdentityId, LabelSet)>,
    /// Content of `endpoint_identities.json`, as `identity::checkpoint::parse_endpoints` reads it.
    pub endpoint_identities: Vec<(IdentityId, LabelSet)>,
    /// Content of `cleaned_names.json`, as [`crate::fqdn::cleaned::parse`] reads it.
    pub cleaned: CleanedNames,
    /// Content of the file of `--tofqdns-pre-cache`, as `fqdn::pre_cache::parse` reads it.
    pub pre_cache: Vec<PreCached>,
    /// Every readable `ep_config.json` ([`crate::endpoint::config_file::parse`]).
    pub endpoints: Vec<EndpointFile>,
    pub ipcache: Vec<(IpcacheKey, IpcacheValue)>,
    pub lxc: Vec<(LxcKey, LxcValue)>,
    /// Dumps of the policy maps that are pinned.
    pub policy_maps: Vec<(EndpointId, Vec<(PolicyKey, PolicyValue)>)>,
    /// What these maps take, where it is known: a map keeps the size that it was made with.
    pub policy_map_sizes: BTreeMap<EndpointId, usize>,
    /// Interfaces to which pinned programs of an endpoint's number are attached.
    pub programs: BTreeMap<EndpointId, BTreeSet<u32>>,
    /// Endpoints at whose interface every program of the earlier run is in force, with the interface.
    pub under_programs: BTreeSet<(EndpointId, u32)>,
    /// Indexes of the interfaces that exist now.
    pub interfaces: BTreeSet<u32>,
}
