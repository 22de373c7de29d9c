//! Metrics of the standalone proxy, as OpenMetrics text.

use std::{fmt, sync::Arc};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _, text},
    metrics::{gauge::ConstGauge, info::Info},
    registry::Registry,
};

use crate::app::Shared;

/// Prefix of every name.
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
        registry.register("sdp", "The instance that answered this scrape", who);
        let link = shared.board.stats();
        for (name, help, count) in [
            (
                "agent_connection_errors",
                "Attempts that found no agent",
                &link.connection_errors,
            ),
            ("agent_sessions", "Sessions with an agent", &link.sessions),
            (
                "dns_rules_applied",
                "Revisions of rules put in force",
                &link.rules_applied,
            ),
            (
                "retrieve_dns_rules_errors",
                "Revisions of rules refused",
                &link.rules_refused,
            ),
        ] {
            registry.register(name, help, count.clone());
        }
        let sink = shared.sink.stats();
        for (name, help, count) in [
            (
                "mapping_leased",
                "Answers released because each pair was leased",
                &sink.leased,
            ),
            (
                "mapping_held",
                "Answers held until the agent had plumbed them",
                &sink.held,
            ),
            (
                "mapping_agent_away",
                "Answers released without an agent",
                &sink.agent_away,
            ),
            (
                "mapping_agent_hung",
                "Answers released past a hung agent",
                &sink.agent_hung,
            ),
            (
                "mapping_queue_full",
                "Answers released as too many were held",
                &sink.queue_full,
            ),
            (
                "mapping_late",
                "Held answers without a result in time",
                &sink.late,
            ),
            (
                "mapping_realised",
                "Mappings the agent has plumbed",
                &sink.realised,
            ),
            (
                "fqdn_mapping_sync_errors",
                "Mappings refused or not plumbed",
                &sink.refused,
            ),
            ("mapping_replayed", "Mappings sent again", &sink.replayed),
            (
                "mapping_revocations",
                "Leases taken back",
                &sink.revocations,
            ),
        ] {
            registry.register(name, help, count.clone());
        }
        let journal = shared.journal.stats();
        for (name, help, count) in [
            (
                "journal_adopted_files",
                "Journals of other processes taken up",
                &journal.adopted_files,
            ),
            (
                "journal_adopted_pairs",
                "Pairs in journals taken up",
                &journal.adopted_pairs,
            ),
            (
                "journal_torn_files",
                "Journals that ended in half a record",
                &journal.torn,
            ),
            (
                "journal_damaged_files",
                "Journals set aside",
                &journal.damaged,
            ),
            (
                "journal_errors",
                "Writes to journals that failed",
                &journal.errors,
            ),
            (
                "journal_skipped",
                "Notes not taken as too many waited for the disk",
                &journal.skipped,
            ),
        ] {
            registry.register(name, help, count.clone());
        }
        registry.register_collector(Box::new(Levels {
            shared: Arc::clone(shared),
        }));
        Self { registry }
    }

    /// The text of a scrape.
    pub fn text(&self) -> Result<String, fmt::Error> {
        let mut out = String::new();
        text::encode(&mut out, &self.registry)?;
        Ok(out)
    }
}

/// What is looked up when it is asked for.
#[derive(Debug)]
struct Levels {
    shared: Arc<Shared>,
}

impl Collector for Levels {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let shared = &self.shared;
        let sink = shared.sink.status();
        let journal = shared.journal.status();
        let damaged = shared
            .skipped_files
            .lock()
            .iter()
            .filter(|file| file.damaged)
            .count();
        for (name, help, level) in [
            (
                "sdp_ready",
                "1 when nothing is missing",
                usize::from(shared.ready.is_ready()),
            ),
            (
                "agent_connected",
                "1 while a session with an agent is up",
                usize::from(shared.board.status().connection.is_some()),
            ),
            (
                "dns_rule_endpoints",
                "Endpoints with DNS rules",
                shared.policy.load().len(),
            ),
            (
                "mapping_kept",
                "Pairs kept for an agent that comes back",
                sink.kept,
            ),
            (
                "mapping_dropped",
                "Pairs dropped as too many were kept",
                usize::try_from(sink.dropped).unwrap_or(usize::MAX),
            ),
            ("mapping_leases", "Pairs with a lease", sink.leases),
            ("mapping_queued", "Mappings not sent yet", sink.queued),
            (
                "mapping_in_flight",
                "Mappings without a result yet",
                sink.in_flight,
            ),
            (
                "agent_hung",
                "1 while the agent counts as hung",
                usize::from(sink.agent_hung),
            ),
            (
                "journal_pairs",
                "Pairs that no agent has made durable",
                journal.pairs,
            ),
            (
                "journal_bytes",
                "Length of the journal",
                usize::try_from(journal.bytes).unwrap_or(usize::MAX),
            ),
            (
                "journal_dropped",
                "Pairs dropped as the journal held too many",
                usize::try_from(journal.dropped).unwrap_or(usize::MAX),
            ),
            (
                "journal_memory_only",
                "1 while mappings are in memory only",
                usize::from(journal.memory_only.is_some()),
            ),
            (
                "damaged_files",
                "Endpoints' files that could not be read",
                damaged,
            ),
        ] {
            let gauge = ConstGauge::new(i64::try_from(level).unwrap_or(i64::MAX));
            let metric = encoder.encode_descriptor(name, help, None, gauge.metric_type())?;
            gauge.encode(metric)?;
        }
        Ok(())
    }
}
