//! What is counted, as Prometheus text.
//!
//! Values of the core are read when they are asked for: counting costs the
//! core nothing in between.

pub mod meanings;

use holdfast_sdp::stats::Stats;
use prometheus_client::{
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{counter::ConstCounter, gauge::ConstGauge},
    registry::Unit,
};

use shared_maps::event::{Counter, Reason};

use crate::{
    cni::failures::AddFailure,
    core::snapshot::Summary,
    datapath::upkeep::{Condition, Part},
    kubernetes::health::WatchHealth,
    proxies::Proxies,
};

/// One look at everything.
#[derive(Debug)]
pub struct Scrape {
    /// Of the core.
    pub summary: Summary,
    /// Rules are given to proxies.
    pub ready: bool,
    /// Damaged files set aside at the start.
    pub damaged: usize,
    /// Endpoint documents not in force.
    pub unresolved: usize,
    /// Interfaces that nothing passes, as their endpoint is not found.
    pub closed_interfaces: usize,
    /// Pods of this node that are not under policy.
    pub unmanaged: usize,
    /// ADDs of the CNI plugin that failed.
    pub add_failures: [(AddFailure, u64); AddFailure::ALL.len()],
    /// Packets and bytes by reason; empty where there is no datapath.
    pub packets: Vec<(Reason, Counter)>,
    /// Parts of the datapath beside the endpoints' own.
    pub conditions: Vec<(Part, Condition)>,
    /// Watches of the cluster; empty where it is no source.
    pub watches: Vec<WatchHealth>,
}

impl prometheus_client::collector::Collector for Sample {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.write(&mut encoder)
    }
}

/// Makes a scrape's text, with the built-in proxy's counters under the names that those of a
/// standalone proxy have.
pub fn text(
    scrape: Scrape,
    proxies: &Proxies,
    builtin: Option<&Stats>,
) -> Result<String, std::fmt::Error> {
    let sample = Sample {
        streams: proxies.views().into_iter().map(|view| view.kind).collect(),
        nacks: proxies.nacks(),
        closed_slow: proxies.closed_slow(),
        unreadable: proxies.unreadable(),
        oversized: proxies.oversized(),
        scrape,
    };
    let mut registry = prometheus_client::registry::Registry::with_prefix("holdfast");
    registry.register_collector(Box::new(sample));
    if let Some(stats) = builtin {
        stats.register(&mut registry);
    }
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry)?;
    Ok(text)
}

#[derive(Debug)]
struct Sample {
    scrape: Scrape,
    streams: Vec<String>,
    nacks: u64,
    closed_slow: u64,
    unreadable: u64,
    oversized: u64,
}

impl Sample {
    fn write(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let mut out = Writer { encoder };
        self.agent(&mut out)?;
        self.policies(&mut out)?;
        self.cluster(&mut out)?;
        self.identities(&mut out)?;
        self.names(&mut out)?;
        self.writes(&mut out)?;
        self.changes(&mut out)?;
        self.reconciler(&mut out)?;
        self.proxies(&mut out)?;
        self.packets(&mut out)?;
        self.restore(&mut out)
    }

    fn agent(&self, out: &mut Writer<'_, '_>) -> Result<(), std::fmt::Error> {
        let summary = &self.scrape.summary;
        out.labelled(
            "agent",
            "1, with the agent's version",
            &[(&[("version", env!("CARGO_PKG_VERSION"))], 1)],
        )?;
        out.gauge(
            "agent_ready",
            "1 when policies and endpoints are listed and DNS rules are published to proxies",
            u64::from(self.scrape.ready),
        )?;
        out.gauge(
            "endpoint",
            "Endpoints (pods) of this node",
            count(summary.endpoints),
        )?;
        out.gauge(
            "endpoint_unresolved",
            "Documents about endpoints that are not in force; `holdfast-agent status` says why",
            count(self.scrape.unresolved),
        )?;
        out.gauge(
            "endpoint_closed_interfaces",
            "Host-side interfaces that are closed, because their endpoint is not found or not under policy yet",
            count(self.scrape.closed_interfaces),
        )
    }

    fn cluster(&self, out: &mut Writer<'_, '_>) -> Result<(), std::fmt::Error> {
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
        let failures = self.scrape.add_failures;
        out.counters(
            "cni_add_failures",
            "Pods that the CNI plugin did not let start, by reason; the runtime tries again",
            &failures.map(|(failure, count)| ("reason", failure.label(), count)),
        )
    }

    fn policies(&self, out: &mut Writer<'_, '_>) -> Result<(), std::fmt::Error> {
        let summary = &self.scrape.summary;
        out.gauge("policy", "Policies in force", count(summary.policies))?;
        out.gauge(
            "cluster_pods",
            "Pods that documents of the cluster describe",
            count(summary.pods),
        )?;
        out.gauge(
            "cluster_services",
            "Services with an address that documents of the cluster describe",
            count(summary.services),
        )?;
        out.gauge(
            "cluster_services_mixed",
            "Services that are closed to an endpoint because policy treats their backends differently; `holdfast-agent status` says which backend",
            count(summary.services_mixed),
        )?;
        out.gauge(
            "policy_refused",
            "Policy documents refused; the last good version of each stays in force",
            count(summary.policies_rejected),
        )?;
        out.gauge(
            "policy_max_revision",
            "Revision of the policy, raised by every change",
            summary.revision,
        )?;
        out.gauge(
            "policy_published_revision",
            "Revision of the DNS rules last published to proxies; lower than policy_max_revision while maps are written",
            summary.published_revision,
        )
    }

    fn identities(&self, out: &mut Writer<'_, '_>) -> Result<(), std::fmt::Error> {
        let summary = &self.scrape.summary;
        let counters = &self.scrape.summary.counters;
        out.labelled(
            "identity",
            "Security identities in use",
            &[
                (&[("type", "endpoint")], count(summary.endpoint_identities)),
                (&[("type", "local")], count(summary.local_identities)),
            ],
        )?;
        out.gauge(
            "identity_fqdn",
            "Local identities with the label of a name",
            count(summary.fqdn_identities),
        )?;
        out.gauge(
            "identity_fqdn_combinations",
            "Local identities with the labels of several names' selectors: what --tofqdns-max-identities limits",
            count(summary.fqdn_combinations),
        )?;
        out.gauge(
            "identity_limited_addresses",
            "Addresses that have the identity of some of their names only, because of --tofqdns-max-identities",
            count(summary.addresses_limited),
        )?;
        out.counter(
            "fqdn_refused_addresses",
            "Addresses in answers that got no label of a name, because of --tofqdns-refuse-prefix",
            counters.addresses_refused,
        )?;
        out.gauge(
            "ipcache_entries",
            "Prefixes (addresses among them) that have an identity in the ipcache map",
            count(summary.ipcache_entries),
        )?;
        out.gauge(
            "ipcache_max_entries",
            "Prefixes that the ipcache map can hold",
            count(summary.ipcache_max),
        )
    }

    fn names(&self, out: &mut Writer<'_, '_>) -> Result<(), std::fmt::Error> {
        let summary = &self.scrape.summary;
        let counters = &self.scrape.summary.counters;
        out.gauge(
            "fqdn_selectors",
            "Selectors of policy rules",
            count(summary.selectors),
        )?;
        out.gauge(
            "fqdn_active_ips",
            "Learned triples of endpoint, name and address whose TTL has not run out",
            count(summary.names_live),
        )?;
        out.gauge(
            "fqdn_alive_zombie_connections",
            "Expired addresses kept open for connections that are alive",
            count(summary.names_zombies),
        )?;
        out.counters(
            "fqdn_mappings",
            "Mappings from proxies, by outcome",
            &[
                ("outcome", "realised", counters.mappings_realised),
                (
                    "outcome",
                    "endpoint_unknown",
                    counters.mappings_endpoint_unknown,
                ),
                ("outcome", "not_allowed", counters.mappings_not_allowed),
                (
                    "outcome",
                    "invalid",
                    counters.mappings_invalid + self.unreadable,
                ),
                ("outcome", "rate_limited", counters.mappings_rate_limited),
                ("outcome", "not_realised", counters.mappings_not_realised),
            ],
        )?;
        out.counter(
            "fqdn_pairs_left_out",
            "Addresses not learned because a name had too many of them, or an endpoint",
            counters.pairs_left_out,
        )
    }

    fn writes(&self, out: &mut Writer<'_, '_>) -> Result<(), std::fmt::Error> {
        let summary = &self.scrape.summary;
        let counters = &self.scrape.summary.counters;
        out.counters(
            "bpf_map_writes",
            "Writes to maps",
            &[
                ("map", "ipcache", counters.ipcache_writes),
                ("map", "policy", counters.policy_writes),
            ],
        )?;
        out.counter(
            "datapath_step_failures",
            "Failed steps, such as map and file writes; the state before stays in force",
            counters.step_failures,
        )?;
        out.gauge(
            "datapath_pending_steps",
            "Failed steps that wait for another attempt",
            count(summary.pending_steps),
        )
    }

    fn changes(&self, out: &mut Writer<'_, '_>) -> Result<(), std::fmt::Error> {
        let counters = &self.scrape.summary.counters;
        out.counter(
            "identity_exhausted",
            "Label sets without an identity because all numbers were in use",
            counters.identity_exhausted,
        )?;
        out.counter(
            "identity_limited",
            "Times that an address got the identity of some of its names only: the circuit breaker",
            counters.identities_limited,
        )?;
        out.counter(
            "ipcache_prefixes_resolved",
            "Prefixes whose labels were resolved: for each change the prefix and those within it",
            counters.prefixes_resolved,
        )?;
        out.counter(
            "fqdn_pairs_removed",
            "Pairs of name and address that were closed again",
            counters.pairs_removed,
        )?;
        out.counter(
            "fqdn_lease_revocations",
            "Leases of proxies that were revoked before their end",
            counters.revocations,
        )
    }

    fn reconciler(&self, out: &mut Writer<'_, '_>) -> Result<(), std::fmt::Error> {
        let counters = &self.scrape.summary.counters;
        let reconciled = &counters.reconciled;
        out.counter(
            "reconcile_passes",
            "Passes that compared the maps with the model",
            reconciled.passes,
        )?;
        let mut differences = vec![
            ("part", "ipcache", reconciled.ipcache),
            ("part", "policy", reconciled.policy),
            ("part", "lxc", reconciled.lxc),
            ("part", "names", reconciled.names),
            ("part", "programs", reconciled.programs),
        ];
        let conditions = &self.scrape.conditions;
        let repairs = conditions.iter();
        differences.extend(repairs.map(|(part, c)| ("part", part.as_str(), c.repairs)));
        let labels: Vec<_> = conditions
            .iter()
            .map(|(p, _)| [("part", p.as_str())])
            .collect();
        let broken = labels.iter().zip(conditions);
        let broken: Vec<_> = broken
            .map(|(label, (_, c))| (label.as_slice(), u64::from(c.fault.is_some())))
            .collect();
        out.counters(
            "reconcile_differences",
            "Repairs, by part: entries of maps that a pass found wrong, and programs, pins, routes, netfilter and steering that the check every 2 s found missing or changed; grows only if something else changes them, or through a fault of the agent",
            &differences,
        )?;
        out.labelled(
            "datapath_broken",
            "1 for a part of the datapath that is wrong and cannot be repaired; `holdfast-agent status` says why",
            &broken,
        )?;
        out.counter(
            "reconcile_failures",
            "Failed reads of a map in such a pass",
            reconciled.failures,
        )
    }

    fn proxies(&self, out: &mut Writer<'_, '_>) -> Result<(), std::fmt::Error> {
        let of_kind = |kind: &str| count(self.streams.iter().filter(|k| *k == kind).count());
        out.labelled(
            "proxy_streams",
            "Proxies connected now, by the stream they have open",
            &[
                (&[("kind", "mappings")], of_kind("mappings")),
                (&[("kind", "rules")], of_kind("rules")),
                (&[("kind", "builtin")], of_kind("builtin")),
                (&[("kind", "fqdndata")], of_kind("fqdndata")),
            ],
        )?;
        out.counter(
            "proxy_rules_refused",
            "Revisions of DNS rules that a proxy refused",
            self.nacks,
        )?;
        out.counter(
            "proxy_streams_closed_slow",
            "Streams of proxies closed because they did not read what was sent",
            self.closed_slow,
        )?;
        out.counter(
            "fqdndata_snapshots_too_large",
            "Snapshots not sent: larger than a proxy of that service can receive",
            self.oversized,
        )
    }

    fn packets(&self, out: &mut Writer<'_, '_>) -> Result<(), std::fmt::Error> {
        let packets = |wanted: fn(Reason) -> bool, value: Value| {
            let of_kind = self
                .scrape
                .packets
                .iter()
                .filter(|(reason, _)| wanted(*reason));
            of_kind
                .map(|(reason, sums)| ("reason", reason.as_str(), value(*sums)))
                .collect::<Vec<_>>()
        };
        let (number, bytes): (Value, Value) = (|c| c.packets, |c| c.bytes);
        let passed = |r: Reason| !r.is_drop() && !r.is_trouble();
        out.counters(
            "drop_count",
            "Packets of endpoints that were dropped, by reason",
            &packets(Reason::is_drop, number),
        )?;
        out.counters(
            "drop_bytes",
            "Bytes of packets of endpoints that were dropped, by reason",
            &packets(Reason::is_drop, bytes),
        )?;
        out.counters(
            "forward_count",
            "Packets of endpoints that passed, by reason",
            &packets(passed, number),
        )?;
        out.counters(
            "forward_bytes",
            "Bytes of packets of endpoints that passed, by reason",
            &packets(passed, bytes),
        )?;
        out.counters(
            "datapath_troubles",
            "Operations that the datapath could not do or undid, although the packet passed",
            &packets(Reason::is_trouble, number),
        )
    }

    fn restore(&self, out: &mut Writer<'_, '_>) -> Result<(), std::fmt::Error> {
        out.gauge(
            "restore_damaged_files",
            "Files found damaged at the start and set aside",
            count(self.scrape.damaged),
        )
    }
}

/// One number of a datapath counter.
type Value = fn(Counter) -> u64;

/// Values of one family with their labels.
type Labelled<'a> = (&'a [(&'static str, &'a str)], u64);

struct Writer<'a, 'e> {
    encoder: &'a mut DescriptorEncoder<'e>,
}

impl Writer<'_, '_> {
    fn gauge(&mut self, name: &str, help: &str, value: u64) -> Result<(), std::fmt::Error> {
        use prometheus_client::metrics::MetricType::Gauge;
        let family = self.encoder.encode_descriptor(name, help, None, Gauge)?;
        ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX)).encode(family)
    }

    fn labelled(
        &mut self,
        name: &str,
        help: &str,
        values: &[Labelled<'_>],
    ) -> Result<(), std::fmt::Error> {
        use prometheus_client::metrics::MetricType::Gauge;
        let mut family = self.encoder.encode_descriptor(name, help, None, Gauge)?;
        for (labels, value) in values {
            let gauge = ConstGauge::new(i64::try_from(*value).unwrap_or(i64::MAX));
            gauge.encode(family.encode_family(labels)?)?;
        }
        Ok(())
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) -> Result<(), std::fmt::Error> {
        use prometheus_client::metrics::MetricType::Counter;
        let family = self.encoder.encode_descriptor(name, help, None, Counter)?;
        ConstCounter::new(value).encode(family)
    }

    fn counters(
        &mut self,
        name: &str,
        help: &str,
        values: &[(&'static str, &'static str, u64)],
    ) -> Result<(), std::fmt::Error> {
        use prometheus_client::metrics::MetricType::Counter;
        let (name, unit) = match name.strip_suffix("_bytes") {
            Some(name) => (name, Some(&Unit::Bytes)),
            None => (name, None),
        };
        let mut family = self.encoder.encode_descriptor(name, help, unit, Counter)?;
        for (label, word, value) in values {
            let labels = [(*label, *word)];
            ConstCounter::new(*value).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

fn count(value: usize) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_carry_the_prefix_and_counters_the_ending() {
        let scrape = Scrape {
            summary: Summary {
                endpoints: 3,
                ..Summary::default()
            },
            ready: true,
            damaged: 0,
            unresolved: 1,
            unmanaged: 0,
            add_failures: AddFailure::ALL.map(|failure| (failure, 0)),
            closed_interfaces: 2,
            packets: vec![(
                Reason::PolicyDenied,
                Counter {
                    packets: 5,
                    bytes: 500,
                },
            )],
            conditions: vec![(
                Part::Routes,
                Condition {
                    repairs: 2,
                    fault: Some("a rule is missing".to_owned()),
                },
            )],
            watches: vec![WatchHealth {
                kind: "Pod".to_owned(),
                objects: 7,
                stale_seconds: 9,
                ..WatchHealth::default()
            }],
        };
        let text = text(scrape, &Proxies::default(), None).unwrap();
        for line in [
            "holdfast_endpoint 3",
            "holdfast_agent_ready 1",
            "holdfast_fqdn_mappings_total{outcome=\"realised\"} 0",
            "holdfast_identity{type=\"local\"} 0",
            "holdfast_endpoint_unresolved 1",
            "holdfast_endpoint_closed_interfaces 2",
            "holdfast_drop_count_total{reason=\"policy_denied\"} 5",
            "holdfast_drop_bytes_total{reason=\"policy_denied\"} 500",
            "holdfast_reconcile_differences_total{part=\"programs\"} 0",
            "holdfast_reconcile_differences_total{part=\"routes\"} 2",
            "holdfast_kubernetes_objects{kind=\"Pod\"} 7",
            "holdfast_kubernetes_watch_stale_seconds{kind=\"Pod\"} 9",
            "holdfast_datapath_broken{part=\"routes\"} 1",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
    }
}
