//! Metrics of `netpol run`.

use std::{fmt, sync::Arc, time::Duration};

use agent_cluster::health::WatchHealth;
use daemon::{
    families, label,
    metrics::{Counts, Families, meanings},
};
use netpol::render::nft::{FRAMES, MIDDLE, SPOOFED, TO_ALL, TUNNELS};
use prometheus_client::{
    collector::Collector,
    encoding::DescriptorEncoder,
    metrics::{counter::Counter, histogram::Histogram},
};

use super::model::NetpolStatus;
use crate::cni::reports::PluginReports;

label! {
    /// What became of a change of the table.
    CommitOutcome = "outcome" {
        /// The kernel accepted the change.
        Changed => "changed",
        /// Another program had changed the table, and it was made again.
        Repaired => "repaired",
        /// The kernel refused the change. The previous table stays in force, and the change is
        /// tried again.
        Failed => "failed",
    }
}

label! {
    /// Which pods a number counts.
    PodState = "state" {
        /// Pods of this node that a policy restricts in at least one direction.
        Restricted => "restricted",
        /// Pods of this node that no policy restricts.
        Open => "open",
    }
}

label! {
    /// Why a packet was dropped.
    DropReason = "reason" {
        /// No policy of the receiving pod allows the packet.
        Ingress => "ingress",
        /// No policy of the sending pod allows the packet.
        Egress => "egress",
        /// The source address does not belong to the pod behind the interface.
        Spoofed => "spoofed",
        /// The frame is from or to a pod's bridge port, and the rules for packets cannot check it:
        /// it has a VLAN tag, is in PPPoE, or is not IPv4, IPv6 or ARP. Or it is a router
        /// advertisement or redirect from a pod.
        Frames => "frames",
        /// The packet is for a multicast or broadcast address and goes to a pod's bridge port,
        /// while an ingress policy restricts a pod of a bridge.
        ToAll => "to_all",
        /// The packet is a TCP segment from or to a restricted pod. It opens no connection, and
        /// belongs to no connection that the kernel tracks.
        Middle => "tcp_middle",
        /// The packet is from a pod to a tunnel of its own node. The node would unpack another
        /// packet from it.
        Tunnels => "tunnels",
    }
}

label! {
    /// A kind of policy that `netpol run` does not enforce.
    UnenforcedKind = "kind" {
        /// A policy of Cilium for the pods of one namespace.
        CiliumNetworkPolicy => "CiliumNetworkPolicy",
        /// A policy of Cilium for pods of all namespaces.
        CiliumClusterwideNetworkPolicy => "CiliumClusterwideNetworkPolicy",
        /// A policy of OVN-Kubernetes.
        EgressFirewall => "EgressFirewall",
    }
}

/// What the label values of these metrics mean: metric, label, value, meaning.
pub fn labels() -> impl Iterator<Item = [&'static str; 4]> {
    meanings::<CommitOutcome>("netpol_commits")
        .chain(meanings::<PodState>("netpol_pods"))
        .chain(meanings::<DropReason>("netpol_dropped_packets"))
        .chain(meanings::<UnenforcedKind>("netpol_not_enforced_policies"))
}

/// Upper ends of the buckets of times, seconds.
const BUCKETS: [f64; 8] = [0.0001, 0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0];

/// What the enforcer counts. Clones share the counters.
#[derive(Clone, Debug)]
pub struct Counters {
    pub(super) outcomes: Counts<CommitOutcome>,
    pub(super) ended_connections: Counter,
    seconds: Histogram,
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            outcomes: Counts::default(),
            ended_connections: Counter::default(),
            seconds: Histogram::new(BUCKETS),
        }
    }
}

impl Counters {
    /// Notes how long the kernel took for a batch.
    pub(super) fn observe(&self, took: Duration) {
        self.seconds.observe(took.as_secs_f64());
    }

    /// How often the table was made again after another program changed it.
    pub(super) fn repairs(&self) -> u64 {
        self.outcomes.get(CommitOutcome::Repaired)
    }
}

/// All values of one scrape of `/metrics`.
#[derive(Clone, Debug, Default)]
pub struct NetpolScrape {
    pub status: Arc<NetpolStatus>,
    pub counters: Counters,
    pub(super) plugin: PluginReports,
    /// Watches of the cluster; empty where it is no source.
    pub watches: Vec<WatchHealth>,
}

impl NetpolScrape {
    /// The scrape as Prometheus text.
    ///
    /// # Errors
    /// The text cannot be written.
    pub fn text(self) -> Result<String, fmt::Error> {
        let mut registry = prometheus_client::registry::Registry::with_prefix("holdfast");
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry)?;
        Ok(text)
    }

    /// Packets that the table dropped for this reason.
    fn dropped(&self, reason: DropReason) -> u64 {
        let counter = match reason {
            DropReason::Ingress => "dropped_in",
            DropReason::Egress => "dropped_out",
            DropReason::Spoofed => SPOOFED,
            DropReason::Frames => FRAMES,
            DropReason::ToAll => TO_ALL,
            DropReason::Middle => MIDDLE,
            DropReason::Tunnels => TUNNELS,
        };
        let all = self.status.dropped.as_ref();
        all.and_then(|all| all.get(counter)).copied().unwrap_or(0)
    }

    fn write(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let status = &self.status;
        let (table, counters) = (&status.table, &self.counters);
        let watches = || self.watches.iter();
        families! { out;
            /// 1 while the nftables table of this node enforces all documents, or the last good
            /// version of refused documents. `holdfast-agent netpol status` names missing parts
            gauge netpol_ready = status.ready;
            /// Changes of the nftables table, by outcome
            counter_by netpol_commits = |outcome| counters.outcomes.get(outcome);
            /// Time that the kernel took for a change of the table
            durations netpol_commit_seconds = &counters.seconds;
            /// Times that the table was made again, because another program had changed it
            counter netpol_repairs = counters.repairs();
            /// nftables chains for pods. Pods with equal rules share one chain
            gauge netpol_chains = table.chains;
            /// nftables sets with addresses of peers
            gauge netpol_groups = table.groups;
            /// Addresses in all nftables sets with addresses of peers, at most 1,000,000
            gauge netpol_group_addresses = table.addresses;
            /// Pods of this node that have an address, by state
            gauge_by netpol_pods = |state| match state {
                PodState::Restricted => status.restricted,
                PodState::Open => status.pods - status.restricted,
            };
            /// Dropped packets since the table was made, by reason
            counter_by netpol_dropped_packets = |reason| self.dropped(reason);
            /// Connection tracking entries that were deleted. An entry is deleted when
            /// its pod ends, and when policy allows the connection in neither direction any more
            counter netpol_ended_connections = counters.ended_connections.get();
            /// Policies of kinds that this node does not enforce
            gauge_by netpol_not_enforced_policies = |kind: UnenforcedKind| {
                status.not_enforced.get(kind.as_str()).copied().unwrap_or(0)
            };
            /// NetworkPolicies that are too large for the table. They restrict their pods, but
            /// allow nothing
            gauge netpol_set_aside_policies = status.set_aside.len();
            /// Refused documents. If a document has a last good version, that version is in force
            gauge netpol_refused_documents = status.refused.len();
            /// Failed attempts of the CNI plugin to add a pod, by reason. The pod does not start,
            /// and the runtime tries again
            counter_by cni_add_failures = |failure| self.plugin.failures.get(failure);
            /// Namespaces whose pods start without policy while no agent answers
            /// (`failOpenNamespaces`). The CNI plugin reports this number with each ADD
            gauge cni_fail_open_namespaces = self.plugin.fail_open();
            /// Objects of the cluster that were read from the API server, without refused objects
            gauges kubernetes_objects["kind"] = watches().map(|watch| (&watch.kind, watch.objects));
            /// Seconds since a watch stopped following the API server; 0 while it follows
            gauges kubernetes_watch_stale_seconds["kind"] =
                watches().map(|watch| (&watch.kind, watch.stale_seconds));
        }
    }
}

impl Collector for NetpolScrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.write(&mut Families(&mut encoder))
    }
}
