//! The agent's metrics, as Prometheus text.
//!
//! Values of the core are read when they are asked for: counting costs the
//! core nothing in between.

mod cluster;
mod cluster_identities;
mod core;
pub mod meanings;
pub mod owner;
pub mod resolver;
mod tunnel;

use std::fmt;

use agent_cluster::health::WatchHealth;
use agent_core::core::snapshot::Summary;
use agent_datapath::{
    tunnel::TunnelStatus,
    upkeep::{Condition, Part},
};
use daemon::{
    families,
    metrics::{Counts, Families, Label as _},
};
use holdfast_sdp::stats::Stats;
use prometheus_client::encoding::DescriptorEncoder;
use shared_maps::event::{Counter, Reason};

use self::{meanings::OpenSetting, owner::OwnerScrape, resolver::ResolverScrape};
use crate::{
    cni::failures::AddFailure,
    identities::view::Identities,
    listener::Listener,
    proxies::{Proxies, StreamKind},
};

/// All values of one scrape of `/metrics`.
#[derive(Debug)]
pub struct Scrape {
    pub summary: Summary,
    /// Whether rules were given to proxies.
    pub ready: bool,
    /// Damaged files set aside at the start.
    pub damaged: usize,
    /// Endpoint documents not in force.
    pub unresolved: usize,
    /// Interfaces that nothing passes because their endpoint is not found.
    pub closed_interfaces: usize,
    /// Pods of this node that are not under policy.
    pub unmanaged: usize,
    /// Pods of this node that ran before they were under policy.
    pub started_open: usize,
    /// Nodes that had an agent and have none.
    pub nodes_without_agent: usize,
    /// ADDs of the CNI plugin that failed.
    pub add_failures: Counts<AddFailure>,
    /// Namespaces whose pods the plugin lets start while no agent answers.
    pub fail_open_namespaces: usize,
    /// Pods with an interface that is not under policy.
    pub unguarded_pods: usize,
    /// Packets and bytes by reason; empty where there is no datapath.
    pub packets: Vec<(Reason, Counter)>,
    /// Parts of the datapath beside the endpoints' own.
    pub conditions: Vec<(Part, Condition)>,
    /// Watches of the cluster; empty where it is no source.
    pub watches: Vec<WatchHealth>,
    /// The resolver of names of EgressFirewalls; `None` where it does not run.
    pub resolver: Option<ResolverScrape>,
    /// What makes CiliumIdentity objects; `None` where the node gives the numbers.
    pub identities: Option<Identities>,
    /// The tunnel between nodes; `None` = this node has no part in it.
    pub tunnel: Option<TunnelStatus>,
    /// How this agent came to own the node, and who takes over.
    pub owner: OwnerScrape,
    /// Sockets with their connections: those that are open, and those that were rejected.
    pub listeners: Vec<(Listener, usize, u64)>,
    /// Descriptors that the agent has open; `None` where the number is not visible.
    pub open_descriptors: Option<usize>,
    /// Descriptors that it may have open.
    pub max_descriptors: usize,
}

impl prometheus_client::collector::Collector for Sample {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.write(&mut encoder)
    }
}

/// Makes a scrape's text, with the built-in proxy's counters under the names that the counters of a
/// standalone proxy have.
pub fn text(
    scrape: Scrape,
    proxies: &Proxies,
    builtin: Option<&Stats>,
) -> Result<String, fmt::Error> {
    let proxies = proxies.clone();
    let mut registry = prometheus_client::registry::Registry::with_prefix("holdfast");
    if let Some(stats) = builtin {
        registry.register_collector(Box::new(stats.clone()));
    }
    registry.register_collector(Box::new(Sample { scrape, proxies }));
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry)?;
    Ok(text)
}

#[derive(Debug)]
struct Sample {
    scrape: Scrape,
    proxies: Proxies,
}

impl Sample {
    fn write(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Families(encoder);
        self.agent(&mut out)?;
        self.scrape.owner.write(&mut out)?;
        self.listeners(&mut out)?;
        self.policies(&mut out)?;
        self.cluster(&mut out)?;
        self.identities(&mut out)?;
        self.cluster_identities(&mut out)?;
        self.tunnel(&mut out)?;
        self.names(&mut out)?;
        self.resolver(&mut out)?;
        self.firewalls(&mut out)?;
        self.writes(&mut out)?;
        self.reconciler(&mut out)?;
        self.proxies(&mut out)?;
        self.packets(&mut out)
    }

    fn agent(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let scrape = &self.scrape;
        families! { out;
            /// 1, with the agent's version
            gauges agent["version"] = [(env!("CARGO_PKG_VERSION"), 1)];
            /// 1 after the agent has read all its sources of policies and endpoints, and has
            /// published DNS rules for the proxies
            gauge agent_ready = scrape.ready;
            /// Endpoints (pods) of this node
            gauge endpoint = scrape.summary.endpoints;
            /// Endpoint documents that are not in force. `holdfast-agent status` gives the reasons
            gauge endpoint_unresolved = scrape.unresolved;
            /// Host-side interfaces that are closed, because the agent has not found their
            /// endpoint, or the endpoint is not yet under policy
            gauge endpoint_closed_interfaces = scrape.closed_interfaces;
            /// Endpoints whose pod has a second interface, to which no policy applies.
            /// `holdfast-agent status` names the interface
            gauge endpoint_unguarded_interfaces = scrape.unguarded_pods;
            /// Endpoints whose policy map is too small for their policy. `holdfast-agent status`
            /// lists what is closed to them
            gauge endpoint_full_policy_maps = scrape.summary.full_policy_maps;
        }
    }

    fn listeners(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let listeners = &self.scrape.listeners;
        families! { out;
            /// Open connections to the agent's sockets, by socket
            gauges listener_connections[Listener::NAME] =
                listeners.iter().map(|(of, open, _)| (of.text(), *open));
            /// Connections to the agent's sockets that the agent refused, or closed to make room
            /// for another connection
            counters listener_rejected[Listener::NAME] =
                listeners.iter().map(|(of, _, rejected)| (of.text(), *rejected));
        }?;
        if let Some(open) = self.scrape.open_descriptors {
            families! { out;
                /// File descriptors (files, sockets, maps) that this process has open
                gauge open_descriptors = open;
            }?;
        }
        families! { out;
            /// File descriptors that this process may have open
            gauge max_descriptors = self.scrape.max_descriptors;
        }
    }

    fn policies(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let summary = &self.scrape.summary;
        let is_open = |setting: OpenSetting| match setting {
            OpenSetting::NameServers => !summary.only_trusted_names,
            OpenSetting::ExternalIps => summary.external_ips_refused,
        };
        families! { out;
            /// 1 for each setting of this agent whose value opens a known gap
            gauge_by open_setting = |setting| u8::from(is_open(setting));
            /// Policies in force
            gauge policy = summary.policies;
            /// Pods that the documents about objects of the cluster describe
            gauge cluster_pods = summary.pods;
            /// Services with an address that the documents about objects of the cluster describe
            gauge cluster_services = summary.services;
            /// Services that are closed to an endpoint, because policy treats their backends
            /// differently. `holdfast-agent status` names a backend
            gauge cluster_services_mixed = summary.services_mixed;
            /// Policy documents that the agent refuses. The last good version of each stays in
            /// force, if there is one. An EgressFirewall without a good version closes its
            /// namespace
            gauge policy_refused = summary.policies_rejected;
            /// Revision of the policy. Every change raises it
            gauge policy_max_revision = summary.revision;
            /// Revision of the DNS rules that the agent sent to proxies last. While the agent
            /// writes the maps, it is lower than holdfast_policy_max_revision
            gauge policy_published_revision = summary.published_revision;
        }
    }

    fn proxies(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let views = self.proxies.views();
        let of_kind = |kind: StreamKind| {
            let of_kind = views.iter().filter(|view| view.kind == kind.as_str());
            of_kind.count()
        };
        families! { out;
            /// Open streams of proxies, by kind of stream
            gauge_by proxy_streams = of_kind;
            /// Revisions of DNS rules that proxies refused
            counter proxy_rules_refused = self.proxies.nacks();
            /// Streams that the agent closed, because the proxy did not read the messages that the
            /// agent sent
            counter proxy_streams_closed_slow = self.proxies.closed_slow();
            /// Rule snapshots that the agent did not send, because they are larger than a proxy of
            /// the FQDNData service can receive
            counter fqdndata_snapshots_too_large = self.proxies.oversized();
        }
    }

    fn packets(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let packets = |wanted: fn(Reason) -> bool, value: fn(Counter) -> u64| {
            let all = self.scrape.packets.iter();
            all.filter(move |(reason, _)| wanted(*reason))
                .map(move |(reason, sums)| (reason.as_str(), value(*sums)))
        };
        let passed = |r: Reason| !r.is_drop() && !r.is_trouble();
        families! { out;
            /// Packets of endpoints that were dropped, by reason
            counters drop_count["reason"] = packets(Reason::is_drop, |c| c.packets);
            /// Bytes of packets of endpoints that were dropped, by reason
            counters drop_bytes["reason"] = packets(Reason::is_drop, |c| c.bytes);
            /// Packets of endpoints that passed, by reason
            counters forward_count["reason"] = packets(passed, |c| c.packets);
            /// Bytes of packets of endpoints that passed, by reason
            counters forward_bytes["reason"] = packets(passed, |c| c.bytes);
            /// Times that the datapath had no room for an event or a map entry, or removed an older
            /// entry to make room, by reason. The packet itself passed
            counters datapath_troubles["reason"] = packets(Reason::is_trouble, |c| c.packets);
            /// Files that the agent found damaged at its start and renamed to ….corrupt
            gauge restore_damaged_files = self.scrape.damaged;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_carry_the_prefix_and_counters_the_ending() {
        let scrape = Scrape {
            summary: Summary {
                endpoints: 3,
                full_policy_maps: 8,
                ..Summary::default()
            },
            ready: true,
            damaged: 0,
            unresolved: 1,
            unmanaged: 0,
            started_open: 4,
            nodes_without_agent: 1,
            add_failures: Counts::default(),
            fail_open_namespaces: 2,
            unguarded_pods: 6,
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
            identities: None,
            tunnel: None,
            owner: OwnerScrape {
                died: 3,
                recent: 2,
                standby_missing: Some(true),
                ..OwnerScrape::default()
            },
            listeners: Listener::ALL.iter().map(|of| (*of, 3, 4)).collect(),
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
            "holdfast_endpoint_unguarded_interfaces 6",
            "holdfast_endpoint_full_policy_maps 8",
            "holdfast_cni_fail_open_namespaces 2",
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
            "holdfast_takeovers_total{end=\"died\"} 3",
            "holdfast_takeovers_total{end=\"stopped\"} 0",
            "holdfast_takeovers_recent 2",
            "holdfast_standby_missing 1",
            "holdfast_max_descriptors 1024",
            "holdfast_kubernetes_pods_started_open 4",
            "holdfast_kubernetes_nodes_without_agent 1",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
    }
}
