//! What is counted, as Prometheus text.
//!
//! Values of the core are read when they are asked for: counting costs the
//! core nothing in between.

mod cluster;
mod core;
pub mod meanings;
pub mod resolver;
mod writer;

use agent_cluster::health::WatchHealth;
use agent_core::core::snapshot::Summary;
use agent_datapath::upkeep::{Condition, Part};
use holdfast_sdp::stats::Stats;
use prometheus_client::encoding::DescriptorEncoder;
use shared_maps::event::{Counter, Reason};

use self::{
    resolver::ResolverScrape,
    writer::{Writer, count},
};
use crate::{cni::failures::AddFailure, listener::Listener, proxies::Proxies};

/// All values of one scrape of `/metrics`.
#[derive(Debug)]
pub struct Scrape {
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
    /// Pods of this node that ran before they were under policy.
    pub started_open: usize,
    /// Nodes that had an agent and have none.
    pub nodes_without_agent: usize,
    /// ADDs of the CNI plugin that failed.
    pub add_failures: [(AddFailure, u64); AddFailure::ALL.len()],
    /// Packets and bytes by reason; empty where there is no datapath.
    pub packets: Vec<(Reason, Counter)>,
    /// Parts of the datapath beside the endpoints' own.
    pub conditions: Vec<(Part, Condition)>,
    /// Watches of the cluster; empty where it is no source.
    pub watches: Vec<WatchHealth>,
    /// The resolver of names of EgressFirewalls; none where it does not run.
    pub resolver: Option<ResolverScrape>,
    /// Sockets with their connections: those that are open, and those that were rejected.
    pub listeners: [(Listener, usize, u64); Listener::ALL.len()],
    /// Descriptors that the agent has open; none where that cannot be seen.
    pub open_descriptors: Option<usize>,
    /// Descriptors that it may have open.
    pub max_descriptors: usize,
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
        self.listeners(&mut out)?;
        self.policies(&mut out)?;
        self.cluster(&mut out)?;
        self.identities(&mut out)?;
        self.names(&mut out)?;
        self.resolver(&mut out)?;
        self.firewalls(&mut out)?;
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

    fn listeners(&self, out: &mut Writer<'_, '_>) -> Result<(), std::fmt::Error> {
        let listeners = &self.scrape.listeners;
        let labels = listeners
            .each_ref()
            .map(|(of, ..)| [("listener", of.as_str())]);
        let open = listeners.iter().map(|(_, open, _)| count(*open));
        let open: Vec<_> = labels.iter().map(|of| &of[..]).zip(open).collect();
        out.labelled(
            "listener_connections",
            "Connections that are open, by the socket of the agent",
            &open,
        )?;
        let rejected = listeners.iter();
        let rejected: Vec<_> = rejected
            .map(|(of, _, rejected)| ("listener", of.as_str(), *rejected))
            .collect();
        out.counters(
            "listener_rejected",
            "Connections that a socket of the agent refused, or closed to make room for another one",
            &rejected,
        )?;
        if let Some(open) = self.scrape.open_descriptors {
            out.gauge(
                "open_descriptors",
                "Descriptors (files, sockets, maps) that this process has open",
                count(open),
            )?;
        }
        out.gauge(
            "max_descriptors",
            "Descriptors that this process may have open",
            count(self.scrape.max_descriptors),
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
            started_open: 4,
            nodes_without_agent: 1,
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
            resolver: None,
            listeners: Listener::ALL.map(|listener| (listener, 3, 4)),
            open_descriptors: Some(70),
            max_descriptors: 1024,
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
            "holdfast_listener_connections{listener=\"sdp\"} 3",
            "holdfast_listener_rejected_total{listener=\"fqdndata\"} 4",
            "holdfast_open_descriptors 70",
            "holdfast_max_descriptors 1024",
            "holdfast_kubernetes_pods_started_open 4",
            "holdfast_kubernetes_nodes_without_agent 1",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
    }
}
