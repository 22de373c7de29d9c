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
        /// The kernel made it.
        Changed => "changed",
        /// Another program had changed the table, and it was made again.
        Repaired => "repaired",
        /// It was refused: the last table stays in force, and the change is tried again.
        Failed => "failed",
    }
}

label! {
    /// Which pods a number counts.
    PodState = "state" {
        /// Pods of this node with a policy about at least one direction.
        Restricted => "restricted",
        /// Pods of this node without a policy.
        Open => "open",
    }
}

label! {
    /// Why a packet was dropped.
    DropReason = "reason" {
        /// No rule of the policies of the receiver allows it.
        Ingress => "ingress",
        /// No rule of the policies of the sender allows it.
        Egress => "egress",
        /// Its source is not an address of the pod behind the interface.
        Spoofed => "spoofed",
        /// A frame from or to a port of a pod, which the rules about packets do not see: under a VLAN
        /// tag, in PPPoE, or of another protocol than IPv4, IPv6 and ARP; or a router advertisement or
        /// redirect of a pod.
        Frames => "frames",
        /// To a group or a broadcast address, to a port of a pod, while a pod of a bridge has an ingress
        /// policy.
        ToAll => "to_all",
        /// A TCP segment from or to a restricted pod that opens no connection and belongs to none that
        /// conntrack knows.
        Middle => "tcp_middle",
        /// A packet of a pod to a tunnel of its own node, which would unpack another packet from it.
        Tunnels => "tunnels",
    }
}

label! {
    /// A kind of policy that `netpol run` does not enforce.
    UnenforcedKind = "kind" {
        /// Of Cilium, about pods of a namespace.
        CiliumNetworkPolicy => "CiliumNetworkPolicy",
        /// Of Cilium, about pods of all namespaces.
        CiliumClusterwideNetworkPolicy => "CiliumClusterwideNetworkPolicy",
        /// Of OVN-Kubernetes.
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

    fn write(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let status = &self.status;
        let (table, counters) = (&status.table, &self.counters);
        let dropped = |counter: &str| {
            let dropped = status.dropped.as_ref();
            dropped
                .and_then(|all| all.get(counter))
                .copied()
                .unwrap_or(0)
        };
        let watches = || self.watches.iter();
        families! { out;
            /// 1 while the nftables table of this node is as the documents say; of a refused document that was
            /// good before, its last good version counts. `holdfast-agent netpol status` names what is missing
            gauge netpol_ready = status.ready;
            /// Changes of the nftables table, by outcome
            counter_by netpol_commits = |outcome| counters.outcomes.get(outcome);
            /// How long the kernel took for a change of the table
            durations netpol_commit_seconds = &counters.seconds;
            /// How often the table was made again, because another program had changed it
            counter netpol_repairs = counters.repairs();
            /// Chains of pods; pods with equal rules share one
            gauge netpol_chains = table.chains;
            /// Sets of peers' addresses
            gauge netpol_groups = table.groups;
            /// Addresses in all sets, at most 1,000,000
            gauge netpol_group_addresses = table.addresses;
            /// Pods of this node that have an address
            gauge_by netpol_pods = |state| match state {
                PodState::Restricted => status.restricted,
                PodState::Open => status.pods - status.restricted,
            };
            /// Dropped packets since the table was made, by reason
            counter_by netpol_dropped_packets = |reason| match reason {
                DropReason::Ingress => dropped("dropped_in"),
                DropReason::Egress => dropped("dropped_out"),
                DropReason::Spoofed => dropped(SPOOFED),
                DropReason::Frames => dropped(FRAMES),
                DropReason::ToAll => dropped(TO_ALL),
                DropReason::Middle => dropped(MIDDLE),
                DropReason::Tunnels => dropped(TUNNELS),
            };
            /// Entries of conntrack that were deleted: those of pods that ended, and those of flows other
            /// than TCP that policy allows in neither direction any more
            counter netpol_ended_connections = counters.ended_connections.get();
            /// Policies of kinds that this node does not enforce
            gauge_by netpol_not_enforced_policies = |kind: UnenforcedKind| {
                status.not_enforced.get(kind.as_str()).copied().unwrap_or(0)
            };
            /// NetworkPolicies that do not fit into the table: they restrict their pods, and allow nothing
            gauge netpol_set_aside_policies = status.set_aside.len();
            /// Documents that are refused; their last good versions are in force
            gauge netpol_refused_documents = status.refused.len();
            /// Pods that the CNI plugin did not let start, by reason; the runtime tries again
            counter_by cni_add_failures = |failure| self.plugin.failures.get(failure);
            /// Namespaces whose pods start without policy while no agent answers
            /// (`failOpenNamespaces`), as the CNI plugin's last ADD reported
            gauge cni_fail_open_namespaces = self.plugin.fail_open();
            /// Objects of the cluster that are read from its API server; those that are refused are
            /// left out
            gauges kubernetes_objects["kind"] = watches().map(|watch| (&watch.kind, watch.objects));
            /// How long a watch has not followed the API server, seconds; 0 = it does
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
