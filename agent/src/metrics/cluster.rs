//! Metrics of the cluster as a source, and of pods without policy.

use std::fmt;

use daemon::{families, metrics::Families};

use super::Sample;

impl Sample {
    pub(super) fn cluster(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let scrape = &self.scrape;
        let watches = || scrape.watches.iter();
        families! { out;
            /// Objects of the cluster that were read from the API server, without refused objects
            gauges kubernetes_objects["kind"] = watches().map(|watch| (&watch.kind, watch.objects));
            /// Seconds since a watch stopped following the API server; 0 while it follows
            gauges kubernetes_watch_stale_seconds["kind"] =
                watches().map(|watch| (&watch.kind, watch.stale_seconds));
            /// Age in seconds of the stored list that the agent uses in place of a watch since its
            /// start; 0 if it uses none
            gauges kubernetes_stored_list_age_seconds["kind"] = watches().map(|watch| {
                (&watch.kind, watch.stored_seconds.map_or(0, |age| age.max(1)))
            });
            /// Pods of this node that have been running for ten seconds without being under policy.
            /// `holdfast-agent status` names them and the reasons
            gauge kubernetes_pods_unmanaged = scrape.unmanaged;
            /// Pods of this node that ran before they were under policy, so that no policy judged
            /// their first packets. `holdfast-agent status` names them, and the time at which each
            /// came under policy
            gauge kubernetes_pods_started_open = scrape.started_open;
            /// Nodes of the cluster that had an agent and have none, as seen by this agent. On
            /// these nodes, policy in force stays in force. New pods do not start if the node has
            /// the CNI plugin, and start open if not. `holdfast-agent status` names the nodes
            gauge kubernetes_nodes_without_agent = scrape.nodes_without_agent;
            /// Failed attempts of the CNI plugin to add a pod, by reason. The pod does not start,
            /// and the runtime tries again
            counter_by cni_add_failures = |failure| scrape.add_failures.get(failure);
            /// Namespaces whose pods start without policy while no agent answers
            /// (`failOpenNamespaces`). The CNI plugin reports this number with each ADD
            gauge cni_fail_open_namespaces = scrape.fail_open_namespaces;
        }
    }
}
