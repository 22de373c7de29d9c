//! Metrics of the standalone proxy, as OpenMetrics text.

use std::{fmt, sync::Arc};

use daemon::descriptors::Descriptors;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _, text},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge, info::Info},
    registry::{Registry, Unit},
};

use crate::{
    config::{Config, ConfigError, args::Settings},
    shared_state::Shared,
    stats::Count,
};

/// Prefix of the names of all metrics.
const PREFIX: &str = "holdfast";

/// Everything that a scrape shows.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
}

impl Metrics {
    /// Registers all counters of `shared`.
    pub fn new(shared: &Arc<Shared>) -> Self {
        let mut registry = Registry::with_prefix(PREFIX);
        shared.stats.register(&mut registry);
        let who = Info::new(vec![
            ("name", shared.config.name.clone()),
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ]);
        registry.register("sdp", "The proxy that answered this scrape", who);
        for (name, help, count) in counts(shared) {
            registry.register(name, help, count.clone());
        }
        registry.register_collector(Box::new(Levels {
            shared: Arc::clone(shared),
        }));
        Self { registry }
    }

    /// The metrics of a new proxy, for the documentation.
    pub fn blank() -> Result<Self, ConfigError> {
        let settings = Settings {
            name: Some("sdp".to_owned()),
            bpf_root: Some("/nonexistent".into()),
            ..Settings::default()
        };
        Ok(Self::new(&Arc::new(Shared::idle(Config::resolve(
            settings,
        )?))))
    }

    /// The text of a scrape.
    pub fn text(&self) -> Result<String, fmt::Error> {
        let mut out = String::new();
        text::encode(&mut out, &self.registry)?;
        Ok(out)
    }
}

type Named<'a> = (&'static str, &'static str, &'a Count);

fn counts(shared: &Shared) -> impl Iterator<Item = Named<'_>> {
    let link = link_counts(shared)
        .into_iter()
        .chain(mapping_counts(shared));
    let disk = journal_counts(shared).into_iter().chain(log_counts(shared));
    link.chain(report_counts(shared)).chain(disk)
}

fn link_counts(shared: &Shared) -> [Named<'_>; 5] {
    let link = shared.agent.link.stats();
    [
        (
            "agent_connection_errors",
            "Failed attempts to connect to an agent, for each of its addresses",
            &link.connection_errors,
        ),
        (
            "agent_sessions",
            "Sessions with an agent; more than one means that a session was lost",
            &link.sessions,
        ),
        (
            "dns_rules_applied",
            "Revisions of DNS rules from the agent that were put in force",
            &link.rules_applied,
        ),
        (
            "retrieve_dns_rules_errors",
            "Revisions of DNS rules from the agent that were refused; the ones before stay in \
             force. With FQDNData also revisions with rows that allow nothing",
            &link.rules_refused,
        ),
        (
            "rule_rows_skipped",
            "Rows of Cilium's rules that were skipped: for another transport than UDP and TCP (protocol ANY includes SCTP), or malformed; counted when their number changes",
            &link.rows_skipped,
        ),
    ]
}

fn mapping_counts(shared: &Shared) -> [Named<'_>; 10] {
    let sink = shared.agent.sink.stats();
    [
        (
            "mapping_leased",
            "Answers released at once because the agent had given a lease for each address, or a \
             Cilium agent had acknowledged it; \
             the same answer again within a second is not counted",
            &sink.leased,
        ),
        (
            "mapping_held",
            "Answers that waited until the agent had opened their addresses",
            &sink.held,
        ),
        (
            "mapping_agent_away",
            "Answers released without an agent; their addresses open when it is back",
            &sink.agent_away,
        ),
        (
            "mapping_agent_hung",
            "Answers released without waiting for an agent that was late three times in a row; results that the proxy had no CPU to read do not count as late",
            &sink.agent_hung,
        ),
        (
            "mapping_queue_full",
            "Answers released before their addresses were open because too many of their pod waited \
             for the agent",
            &sink.queue_full,
        ),
        (
            "mapping_late",
            "Answers for which the agent took longer than the response max delay: released, \
             their addresses open a moment later",
            &sink.late,
        ),
        (
            "mapping_realised",
            "Mappings whose addresses the agent has opened",
            &sink.realised,
        ),
        (
            "fqdn_mapping_sync_errors",
            "Mappings that the agent refused, could not realise or, with FQDNData, did not answer within 5 s",
            &sink.refused,
        ),
        (
            "mapping_replayed",
            "Mappings sent again to an agent that came back",
            &sink.replayed,
        ),
        (
            "mapping_revocations",
            "Leases that the agent revoked",
            &sink.revocations,
        ),
    ]
}

fn report_counts(shared: &Shared) -> [Named<'_>; 2] {
    let reports = shared.agent.reports.stats();
    [
        (
            "agent_notices",
            "Queries, answers and failures reported to a Cilium agent for its log and metrics",
            &reports.sent,
        ),
        (
            "agent_notices_dropped",
            "Reports dropped because too many waited for the agent, or came in a second",
            &reports.dropped,
        ),
    ]
}

fn journal_counts(shared: &Shared) -> [Named<'_>; 6] {
    let journal = shared.agent.journal.stats();
    [
        (
            "journal_adopted_files",
            "Journals of ended proxies that were adopted",
            &journal.adopted_files,
        ),
        (
            "journal_adopted_pairs",
            "Pairs of name and address in adopted journals",
            &journal.adopted_pairs,
        ),
        (
            "journal_torn_files",
            "Journals with an incomplete last record: their proxy was killed during a write",
            &journal.torn,
        ),
        (
            "journal_damaged_files",
            "Journals set aside because they could not be read",
            &journal.damaged,
        ),
        (
            "journal_errors",
            "Operations on journals that failed: a full disk, a directory that cannot be written",
            &journal.errors,
        ),
        (
            "journal_skipped",
            "Pairs not written to the journal because too many of their pod waited for the disk",
            &journal.skipped,
        ),
    ]
}

fn log_counts(shared: &Shared) -> [Named<'_>; 3] {
    let log = &shared.logs.query_stats;
    [
        (
            "query_log_lines",
            "Lines written to the query log",
            &log.lines,
        ),
        (
            "query_log_dropped",
            "Lines missing in the query log: it could not be written, or not fast enough",
            &log.dropped,
        ),
        (
            "query_log_errors",
            "Failed attempts to write or open the query log",
            &log.errors,
        ),
    ]
}

/// A value that is read when metrics are requested.
#[derive(Debug)]
struct Levels {
    shared: Arc<Shared>,
}

impl Collector for Levels {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.readiness(&mut encoder)?;
        self.connections(&mut encoder)?;
        self.descriptors(&mut encoder)?;
        self.mappings(&mut encoder)?;
        self.journal(&mut encoder)?;
        self.dropped(&mut encoder)
    }
}

impl Levels {
    fn readiness(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let shared = &self.shared;
        let sink = shared.agent.sink.status();
        gauge(
            encoder,
            "sdp_ready",
            "1 when the proxy can serve; otherwise /readyz lists the missing parts",
            None,
            usize::from(shared.ready.is_ready()),
        )?;
        gauge(
            encoder,
            "agent_connected",
            "1 while a session with an agent is up",
            None,
            usize::from(shared.agent.link.status().connection.is_some()),
        )?;
        gauge(
            encoder,
            "agent_hung",
            "1 while answers do not wait for the agent because it did not answer three times in a row",
            None,
            usize::from(sink.agent_hung),
        )?;
        gauge(
            encoder,
            "dns_rule_endpoints",
            "Endpoints that have DNS rules; queries of all others are refused",
            None,
            shared.policy.load().len(),
        )
    }

    fn connections(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let of = &self.shared.connections;
        let listeners = [("admin", &of.admin), ("metrics", &of.metrics)];
        let mut family = encoder.encode_descriptor(
            "listener_connections",
            "Connections that are open, by the socket for people and probes",
            None,
            MetricType::Gauge,
        )?;
        for (name, counts) in listeners {
            let open = ConstGauge::new(i64::try_from(counts.open()).unwrap_or(i64::MAX));
            open.encode(family.encode_family(&[("listener", name)])?)?;
        }
        let mut family = encoder.encode_descriptor(
            "listener_rejected",
            "Connections that a socket for people and probes refused, or closed to make room for \
             another one",
            None,
            MetricType::Counter,
        )?;
        for (name, counts) in listeners {
            let rejected = ConstCounter::new(counts.rejected());
            rejected.encode(family.encode_family(&[("listener", name)])?)?;
        }
        Ok(())
    }

    fn descriptors(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        if let Ok(open) = Descriptors::open() {
            gauge(
                encoder,
                "open_descriptors",
                "Descriptors (files, sockets, maps) that this process has open",
                None,
                open,
            )?;
        }
        gauge(
            encoder,
            "max_descriptors",
            "Descriptors that this process may have open",
            None,
            Descriptors::now().limit(),
        )
    }

    fn mappings(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let sink = self.shared.agent.sink.status();
        gauge(
            encoder,
            "mapping_kept",
            "Pairs of name and address kept until the agent is back",
            None,
            sink.kept,
        )?;
        gauge(
            encoder,
            "mapping_leases",
            "Pairs of name and address under a lease of the agent",
            None,
            sink.leases,
        )?;
        gauge(
            encoder,
            "mapping_queued",
            "Mappings not sent to the agent yet",
            None,
            sink.queued,
        )?;
        gauge(
            encoder,
            "mapping_in_flight",
            "Mappings sent to the agent that have no result yet",
            None,
            sink.in_flight,
        )
    }

    fn journal(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let shared = &self.shared;
        let journal = shared.agent.journal.status();
        let skipped = shared.skipped_files.lock();
        let damaged = skipped.iter().filter(|file| file.damaged).count();
        drop(skipped);
        gauge(
            encoder,
            "journal_pairs",
            "Pairs of name and address that no agent has made durable",
            None,
            journal.pairs,
        )?;
        gauge(
            encoder,
            "journal",
            "Length of the journal",
            Some(&Unit::Bytes),
            usize::try_from(journal.bytes).unwrap_or(usize::MAX),
        )?;
        gauge(
            encoder,
            "journal_memory_only",
            "1 while the journal cannot be written: pairs are lost if this proxy is killed",
            None,
            usize::from(journal.memory_only.is_some()),
        )?;
        gauge(
            encoder,
            "damaged_files",
            "Files of endpoints that could not be read at the start",
            None,
            damaged,
        )
    }

    fn dropped(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let sink = self.shared.agent.sink.status();
        let journal = self.shared.agent.journal.status();
        for (name, help, count) in [
            (
                "mapping_dropped",
                "Pairs of name and address dropped because too many were kept, from the pod with most of them",
                sink.dropped,
            ),
            (
                "journal_dropped",
                "Pairs of name and address not in the journal because it held too many, or too many waited for the disk",
                journal.dropped,
            ),
        ] {
            let counter = ConstCounter::new(count);
            let metric = encoder.encode_descriptor(name, help, None, counter.metric_type())?;
            counter.encode(metric)?;
        }
        Ok(())
    }
}

fn gauge(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    level: usize,
) -> fmt::Result {
    let gauge = ConstGauge::new(i64::try_from(level).unwrap_or(i64::MAX));
    let metric = encoder.encode_descriptor(name, help, unit, gauge.metric_type())?;
    gauge.encode(metric)
}
