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
    /// Blocks of the cluster's pods and Services. An address in them of which nothing else is known
    /// has the identity `unmanaged`, not `world`.
    pub cluster_blocks: Vec<IpNet>,
    /// Blocks of pods; empty if they are unknown.
    pub pod_blocks: Vec<IpNet>,
    /// Further addresses of Services, besides those in their documents: (address,
    /// `namespace/name`).
    pub service_aliases: Vec<(IpAddr, String)>,
    /// DNS servers that are trusted for names; empty = those of `dns_service`.
    pub dns_servers: Vec<SocketAddr>,
    /// Whether the DNS servers of `dns_service` are trusted too.
    pub with_dns_service: bool,
    /// DNS servers whose answers count for `toFQDNs`.
    pub name_servers: NameServers,
    /// The Service of the cluster's DNS servers, `namespace/name`.
    pub dns_service: String,
    /// Range of the numbers for identity objects that are to be made. The numbers of label sets of pods are
    /// then the cluster's. `None`: this node gives numbers itself, except those of documents.
    pub cluster_identities: Option<IdentityRange>,
    /// Role of this node in the tunnel between nodes; `None` = packets carry no identity.
    pub high_scale: Option<TunnelMode>,
    /// Which pods of the cluster are read.
    pub pods: PodScope,
    /// Whether `spec.externalIPs` of Services count.
    pub external_ips: ExternalIps,
    /// Port of the DNS proxy.
    pub proxy_port: u16,
    /// Policy mode of endpoints that have no mode of their own.
    pub enable_policy: PolicyMode,
    pub enable_ipv4: bool,
    pub enable_ipv6: bool,
    /// Minimum of every TTL, in seconds.
    pub min_ttl: u32,
    /// How long a lease lasts beyond the TTL.
    pub lease_slack: Duration,
    /// Maximum number of addresses that an endpoint holds per name. Beyond it, the addresses that
    /// expire first become zombies.
    pub max_ips_per_name: usize,
    /// Maximum number of pairs (name, address) that an endpoint holds, valid or as zombies. Further
    /// pairs are refused. This bounds names too: each has an address.
    pub max_pairs_per_endpoint: usize,
    /// Maximum number of zombies of an endpoint; 0 = expired addresses are removed at once.
    pub max_deferred_deletes: usize,
    /// How long an idle connection counts as alive.
    pub idle_grace: Duration,
    /// How long restored identities and labels are held after the first sync.
    pub restore_grace: Duration,
    /// Maximum number of entries in a policy map.
    pub policy_map_max: usize,
    pub ipcache_max: usize,
    /// Whether every FQDN selector gets its identity before any address is known.
    pub preallocate_identities: bool,
    /// Maximum number of combinations of `fqdn` labels that get an identity because of answers;
    /// `None` = no circuit breaker.
    pub max_fqdn_identities: Option<usize>,
    /// Prefixes whose addresses get no label of a name.
    pub refused_prefixes: RefusedPrefixes,
    /// Average number of addresses per second that one stream may send in mappings. A burst of one
    /// endpoint may have ten times as many, and a burst of all endpoints of the stream twenty times
    /// as many.
    pub mapping_rate: u32,
    /// Whether a file of which only the names changed is written in the background
    /// ([`Step::KeepNames`]), so that a slow disk delays no answer.
    ///
    /// [`Step::KeepNames`]: crate::datapath::plan::Step::KeepNames
    pub names_kept_later: bool,
    /// Maximum number of addresses listed per selector in the restored rules of `ep_config.json`.
    pub max_ips_per_restored_rule: usize,
    /// Maximum cost of one part of a change of policy, in units of about ten microseconds. An
    /// answer may have to wait for one part.
    pub work_budget: usize,
    /// Time between two passes that compare the datapath with the model.
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
    /// Maximum number of entries of these maps, where it is known: a map keeps the size that it was
    /// made with.
    pub policy_map_sizes: BTreeMap<EndpointId, usize>,
    /// Interfaces to which pinned programs of an endpoint's number are attached.
    pub programs: BTreeMap<EndpointId, BTreeSet<u32>>,
    /// (Endpoint, interface) where every program of the earlier run is in force.
    pub under_programs: BTreeSet<(EndpointId, u32)>,
    /// Indexes of the interfaces that exist now.
    pub interfaces: BTreeSet<u32>,
}
