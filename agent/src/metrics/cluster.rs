//! Metrics of the cluster as a source, and of pods without policy.

use agent_cluster::health::WatchHealth;

use super::{
    Sample,
    writer::{Writer, count},
};

impl Sample {
    pub(super) fn cluster(&self, out: &mut Writer<'_, '_>) -> Result<(), std::fmt::Error> {
        let of_each = |value: fn(&WatchHealth) -> u64| -> Vec<_> {
            let watches = self.scrape.watches.iter();
            watches
                .map(|watch| ([("kind", watch.kind.as_str())], value(watch)))
                .collect()
        };
        for (name, help, values) in [
            (
                "kubernetes_objects",
                "Objects of the cluster that are read from its API server; those that are refused are left out",
                of_each(|watch| count(watch.objects)),
            ),
            (
                "kubernetes_watch_stale_seconds",
                "How long a watch has not followed the API server, seconds; 0 = it does",
                of_each(|watch| watch.stale_seconds),
            ),
            (
                "kubernetes_stored_list_age_seconds",
                "How old the stored list is that stands in for a watch since the agent's start, seconds; 0 = none does",
                of_each(|watch| watch.stored_seconds.map_or(0, |age| age.max(1))),
            ),
        ] {
            let values: Vec<_> = values
                .iter()
                .map(|(labels, value)| (&labels[..], *value))
                .collect();
            out.labelled(name, help, &values)?;
        }
        out.gauge(
            "kubernetes_pods_unmanaged",
            "Pods of this node that have been running for ten seconds without being under policy; `holdfast-agent status` says which, and why",
            count(self.scrape.unmanaged),
        )?;
        out.gauge(
            "kubernetes_pods_started_open",
            "Pods of this node that ran before they were under policy, so that no policy judged their first packets; `holdfast-agent status` says which, and until when",
            count(self.scrape.started_open),
        )?;
        out.gauge(
            "kubernetes_nodes_without_agent",
            "Nodes of the cluster that had an agent and have none, as this agent sees them: policy in force stays there, and no new pod starts; `holdfast-agent status` says which",
            count(self.scrape.nodes_without_agent),
        )?;
        let failures = self.scrape.add_failures;
        out.counters(
            "cni_add_failures",
            "Pods that the CNI plugin did not let start, by reason; the runtime tries again",
            &failures.map(|(failure, count)| ("reason", failure.label(), count)),
        )
    }
}
