//! The core's state as plain data, for the admin socket and metrics.

use serde::{Deserialize, Serialize};

use crate::identity::{cluster::ClusterCounts, cluster_object::NumberSource};

/// The whole state. Built on demand: the cost grows with the size of the state.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct Snapshot {
    /// Counts, as [`crate::core::Core::summary`] returns them.
    pub summary: Summary,
    pub endpoints: Vec<EndpointView>,
    /// Identities by number, reserved ones left out.
    pub identities: Vec<IdentityView>,
    pub ipcache: Vec<IpcacheView>,
    pub selectors: Vec<SelectorView>,
    /// Learned names, one line per endpoint, name and address.
    pub names: Vec<NameView>,
    pub policies: Vec<PolicyView>,
    /// Policy documents that are refused, and endpoints that the core cannot take.
    pub rejected: Vec<RejectedView>,
}

/// Counts of the core's state, cheap to make.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct Summary {
    /// Revision of the intended policy; proxies may not have it yet.
    pub revision: u64,
    /// Revision last published to proxies.
    pub published_revision: u64,
    /// Whether the listings of policies and of endpoints, and every other listing that had begun, were complete once.
    pub synced: bool,
    pub endpoints: usize,
    /// Endpoints without a restricted direction.
    pub endpoints_unrestricted: usize,
    /// The first few of these endpoints: the pod, `namespace/name`, or the key of an endpoint that
    /// is no pod.
    pub unrestricted: Vec<String>,
    /// Policies in force; documents of other kinds do not count.
    pub policies: usize,
    pub policies_rejected: usize,
    /// The first few of the documents that are refused, with reasons that may be cut short.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refused: Vec<RejectedView>,
    /// Allocated identities of addresses outside the cluster.
    pub local_identities: usize,
    /// Local identities with the label of a name.
    pub fqdn_identities: usize,
    /// Local identities with the labels of several selectors of names.
    pub fqdn_combinations: usize,
    /// Maximum number of such combinations, if they are limited.
    pub fqdn_identities_max: Option<usize>,
    /// Addresses that have the identity of only some of their names, because of that limit.
    pub addresses_limited: usize,
    pub endpoint_identities: usize,
    /// Label sets of pods, by where their numbers come from; `None` = this node gives the numbers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster_identities: Option<ClusterCounts>,
    /// Pods that the cluster's objects name.
    pub pods: usize,
    /// Pods without an identity, because no number is free.
    pub pods_without_identity: usize,
    /// How many Namespace objects there are.
    pub namespaces: usize,
    /// NetworkPolicies of Kubernetes in force.
    pub network_policies: usize,
    pub firewalls: FirewallSummary,
    /// Names and patterns that `toFQDNs` rules have.
    pub fqdn_selectors: usize,
    /// Whether only answers of trusted DNS servers count for these names.
    pub only_trusted_names: bool,
    /// Whether external addresses of Services are not judged as the Service.
    pub external_ips_refused: bool,
    /// Services that the cluster's objects name.
    pub services: usize,
    /// Services that are closed to an endpoint because policy treats their backends
    /// differently.
    pub services_mixed: usize,
    /// Prefixes that the ipcache map has if all plans were carried out.
    pub ipcache_entries: usize,
    /// Maximum number of prefixes in the ipcache map.
    pub ipcache_max: usize,
    /// Maximum number of entries in a policy map.
    pub policy_map_max: usize,
    pub selectors: usize,
    /// Valid triples (endpoint, name, address).
    pub names_live: usize,
    /// Expired addresses of names that are kept because connections may use them.
    pub names_zombies: usize,
    /// Pairs (name, address) kept on the node.
    pub pairs: usize,
    /// Steps that failed and are waiting to be tried again.
    pub pending_steps: usize,
    /// Endpoints whose policy or programs are not in force, and why; the first few.
    pub endpoint_problems: Vec<String>,
    /// Endpoints whose policy map has no room for their policy.
    pub full_policy_maps: usize,
    /// Why a step of the last plan failed.
    pub trouble: Option<String>,
    pub counters: Counters,
}

/// A limit, and how much of it is used.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct LimitView {
    /// What is limited, for example `endpoints`.
    pub what: String,
    pub used: usize,
    /// The limit; `None` = not limited.
    pub most: Option<usize>,
}

/// Counters since the agent's start.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct Counters {
    /// Mappings whose addresses have their identity in the datapath.
    pub mappings_realised: u64,
    /// Mappings refused: the endpoint is unknown.
    pub mappings_endpoint_unknown: u64,
    /// Mappings refused: not allowed by the endpoint's DNS policy.
    pub mappings_not_allowed: u64,
    /// Mappings refused: a field out of range.
    pub mappings_invalid: u64,
    /// Mappings refused: too many on one stream.
    pub mappings_rate_limited: u64,
    /// Mappings that the datapath could not take.
    pub mappings_not_realised: u64,
    /// Addresses not learned: the mapping had too many, or its endpoint holds as many as it may.
    pub pairs_left_out: u64,
    /// Addresses in mappings that got no label because of `--tofqdns-refuse-prefix`.
    pub addresses_refused: u64,
    /// Answers for names that `toFQDNs` rules select, from DNS servers that are not trusted.
    pub answers_untrusted: u64,
    /// Prefixes whose labels were looked at, because these or the labels of a covering prefix changed.
    pub prefixes_resolved: u64,
    pub ipcache_writes: u64,
    pub policy_writes: u64,
    /// Steps that failed, or were skipped because another one failed. Each attempt counts.
    pub step_failures: u64,
    /// Label sets that got no identity: numbers exhausted.
    pub identity_exhausted: u64,
    /// Addresses that got the identity of only some of their names: circuit breaker.
    pub identities_limited: u64,
    /// Pairs (name, address) whose label was removed.
    pub pairs_removed: u64,
    /// Revocations that were begun; one may cover several addresses of a name.
    pub revocations: u64,
    /// Answers, by what they meant for EgressFirewalls.
    pub observations: Observations,
    /// What comparing the datapath with the model found.
    pub reconciled: Reconciled,
}

/// EgressFirewalls in force, and what their names depend on.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct FirewallSummary {
    pub firewalls: usize,
    pub rules: usize,
    /// Names and patterns that these firewalls use.
    pub names: usize,
    /// Pairs (name, address) whose address has a label of such a name.
    pub addresses: usize,
    /// DNSNameResolver objects that are not read, because there are too many.
    pub objects_left_out: usize,
    /// DNS servers whose answers count, by the addresses at which pods ask them.
    pub trusted_dns: Vec<String>,
    /// Entries of policy maps that firewalls decide; endpoints of one identity count once.
    pub entries: usize,
    /// Whether pods of other nodes count as addresses outside the cluster, because no document shows which addresses
    /// they have.
    pub takes_pods_for_outside: bool,
}

/// Answers, by what they meant for EgressFirewalls; not counted while no firewall uses a name.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct Observations {
    /// A firewall uses the name, and the server counts.
    pub taken: u64,
    /// No firewall uses the name.
    pub unmatched: u64,
    /// A firewall uses the name, and the server does not count.
    pub untrusted: u64,
}

/// What comparing the datapath with the model found ([`crate::core::Core::next_query`]).
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct Reconciled {
    /// Complete passes over every map and every learned name.
    pub passes: u64,
    /// Queries of a map that failed.
    pub failures: u64,
    /// Entries of the ipcache that were wrong, missing or without an owner.
    pub ipcache: u64,
    /// Entries of policy maps that were wrong, missing or without an owner.
    pub policy: u64,
    /// Entries of `cilium_lxc` that were wrong, missing or without an owner.
    pub lxc: u64,
    /// Names with an address that did not carry the right labels.
    pub names: u64,
    /// Endpoints whose programs were not attached, not the first, or not the right ones.
    pub programs: u64,
}

/// An endpoint as commands and the API show it.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct EndpointView {
    pub id: u16,
    /// Key that the endpoint's source gave it.
    pub key: String,
    /// The endpoint's pod, in the form `namespace/name`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    pub identity: u32,
    pub labels: Vec<String>,
    /// Named ports, each as `name=port/protocol`.
    pub named_ports: Vec<String>,
    pub ipv4: Option<String>,
    pub ipv6: Option<String>,
    /// Index of the host-side interface.
    pub ifindex: u32,
    /// Name of the host-side interface.
    pub ifname: String,
    /// Where its network namespace was found.
    pub netns: String,
    /// `ready`, or `restored` until its source names it.
    pub state: String,
    /// Whether policy restricts what it may send.
    pub egress_enforced: bool,
    /// Whether policy restricts what it may receive.
    pub ingress_enforced: bool,
    /// Its policy mode: `default`, `always` or `never`.
    pub enable_policy: String,
    /// Policy documents that select it.
    pub policies: Vec<String>,
    /// EgressFirewalls that restrict what it may send, `EgressFirewall/namespace/name`.
    pub firewalls: Vec<String>,
    /// Entries of its policy map in force.
    pub policy_entries: usize,
    /// Policy revision that the entries of its policy map follow from.
    pub policy_revision: u64,
    /// Server ports with DNS rules.
    pub dns_rules: Vec<DnsRulesView>,
    /// Why its policy is not in force, if it is not.
    pub problem: Option<String>,
}

impl EndpointView {
    /// The name by which people know it: its pod, else its key.
    pub fn called(&self) -> &str {
        self.pod.as_deref().unwrap_or(&self.key)
    }
}

/// DNS rules of one server port.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct DnsRulesView {
    /// Port of the DNS servers.
    pub port: u16,
    /// `UDP` or `TCP`.
    pub protocol: String,
    pub selector: String,
    /// Server identities; `None` = any server.
    pub servers: Option<Vec<u32>>,
    /// Names; `None` = every name.
    pub names: Option<Vec<String>>,
}

/// An allocated identity with its labels.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct IdentityView {
    pub id: u32,
    pub labels: Vec<String>,
    /// Prefixes, endpoints and selectors that hold it.
    pub references: usize,
    /// Where the number comes from.
    #[serde(default)]
    pub source: NumberSource,
    /// When the object of the number was made, seconds since 1970; `None` = the number has no object, or the object has
    /// no time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<u64>,
}

/// A prefix with its identities.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct IpcacheView {
    pub prefix: String,
    /// Identity that the prefix should have; 0 = none.
    pub identity: u32,
    /// Identity that the datapath has, if any.
    pub realised: Option<u32>,
    /// The owners of its labels, as texts.
    pub owners: Vec<String>,
}

/// A registered selector and what it selects.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct SelectorView {
    pub selector: String,
    /// As [`Selector::kind`](crate::selector::selector::Selector::kind) has it.
    pub kind: String,
    /// How many rules use it.
    pub users: usize,
    pub identities: Vec<u32>,
}

/// One learned address of one endpoint.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct NameView {
    pub endpoint: u16,
    pub name: String,
    pub address: String,
    /// `lookup`, or `connection` for an expired address still in use.
    pub source: String,
    /// TTL of the answer that expires last, seconds; 0 for a `connection`.
    pub ttl: u32,
    /// When it was learned, nanoseconds of CLOCK_BOOTTIME.
    pub seen_at: u64,
    /// When its TTL ends, nanoseconds of CLOCK_BOOTTIME.
    pub expires_at: u64,
    /// When the lease of the pair ends, nanoseconds of CLOCK_BOOTTIME; 0 = none.
    pub lease_end: u64,
}

/// One policy document in force.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct PolicyView {
    /// Key of the document, `kind/namespace/name` or `kind/name`.
    pub key: String,
    /// File of the document; `cluster` for an object of the API server.
    pub source: String,
    /// Warnings for the document's author.
    pub warnings: Vec<String>,
    /// Numbers of the endpoints that it selects.
    pub endpoints: Vec<u16>,
}

/// [`RejectedView::source`] of an endpoint that the core cannot take.
pub const ENDPOINT: &str = "endpoint";

/// A document that is refused, or an endpoint that the core cannot take.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct RejectedView {
    /// File or directory of the document; `cluster` for an object of the API server; or
    /// [`ENDPOINT`].
    pub source: String,
    /// Key of the document, if it could be read.
    pub key: Option<String>,
    /// Why it is refused, with the field and the remedy.
    pub reason: String,
}

impl RejectedView {
    /// The same, with at most `most` characters in each text.
    pub(super) fn cut_to(self, most: usize) -> Self {
        Self {
            source: cut(self.source, most),
            key: self.key.map(|key| cut(key, most)),
            reason: cut(self.reason, most),
        }
    }
}

fn cut(text: String, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
