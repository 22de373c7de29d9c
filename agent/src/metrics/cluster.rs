//! Metrics of the cluster as a source, and of pods without policy.

use std::fmt;

use daemon::{families, metrics::Families};

use super::Sample;

impl Sample {
    pub(super) fn cluster(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let scrape = &self.scrape;
        let watches = || scrape.watches.iter();
        families! { out;
            /// Objects of the cluster that are read from its API server; those that are refused are
            /// left out
            gauges kubernetes_objects["kind"] = watches().map(|watch| (&watch.kind, watch.objects));
            /// How long a watch has not followed the API server, seconds; 0 = it does
            gauges kubernetes_watch_stale_seconds["kind"] =
                watches().map(|watch| (&watch.kind, watch.stale_seconds));
            /// Age of the stored list that has stood in for a watch since the agent's start,
            /// seconds; 0 = none does
            gauges kubernetes_stored_list_age_seconds["kind"] = watches().map(|watch| {
                (&watch.kind, watch.stored_seconds.map_or(0, |age| age.max(1)))
            });
            /// Pods of this node that have been running for ten seconds without being under policy;
            /// `holdfast-agent status` says which, and why
            gauge kubernetes_pods_unmanaged = scrape.unmanaged;
            /// Pods of this node that ran before they were under policy, so that no policy judged
            /// their first packets; `holdfast-agent status` says which, and until when
            gauge kubernetes_pods_started_open = scrape.started_open;
            /// Nodes of the cluster that had an agent and have none, as this agent sees them:
            /// policy in force stays there, and no new pod starts; `holdfast-agent status` says
            /// which
            gauge kubernetes_nodes_without_agent = scrape.nodes_without_agent;
            /// Pods that the CNI plugin did not let start, by reason; the runtime tries again
            counter_by cni_add_failures = |failure| scrape.add_failures.get(failure);
            /// Namespaces whose pods start without policy while no agent answers
            /// (`failOpenNamespaces`), as the CNI plugin's last ADD reported
            gauge cni_fail_open_namespaces = scrape.fail_open_namespaces;
        }
    }
}
