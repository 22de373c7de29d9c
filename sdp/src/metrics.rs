//! Metrics of the standalone proxy, as OpenMetrics text.

use std::{fmt, sync::Arc};

use daemon::{descriptors::Descriptors, families, metrics::Families};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, text},
    metrics::info::Info,
    registry::Registry,
};

use crate::{
    config::{Config, ConfigError},
    shared_state::Shared,
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
        registry.register_collector(Box::new(shared.stats.clone()));
        registry.register_collector(Box::new(Levels {
            shared: Arc::clone(shared),
        }));
        Self { registry }
    }

    /// The metrics of a new proxy, for the documentation.
    pub fn blank() -> Result<Self, ConfigError> {
        let line = ["holdfast-sdp", "--name=sdp", "--bpf-root=/nonexistent"];
        let config = Config::resolve(line.map(Into::into))?;
        Ok(Self::new(&Arc::new(Shared::idle(config))))
    }

    /// The text of a scrape.
    pub fn text(&self) -> Result<String, fmt::Error> {
        let mut out = String::new();
        text::encode(&mut out, &self.registry)?;
        Ok(out)
    }
}

/// Values that are read when metrics are requested.
#[derive(Debug)]
struct Levels {
    shared: Arc<Shared>,
}

impl Collector for Levels {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Families(&mut encoder);
        self.program(&mut out)?;
        self.agent(&mut out)?;
        self.outcomes(&mut out)?;
        self.files(&mut out)?;
        self.readiness(&mut out)?;
        self.connections(&mut out)?;
        self.mappings(&mut out)?;
        self.journal(&mut out)
    }
}

impl Levels {
    fn program(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let program = Info::new(vec![
            ("name", self.shared.config.name.clone()),
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ]);
        families! { out;
            /// Name and version of the proxy that answered this scrape.
            metric sdp = &program;
        }
    }

    fn agent(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let link = self.shared.agent.link.stats();
        families! { out;
            /// Failed attempts to connect to an agent. If the agent has several addresses, each of
            /// them counts.
            counter agent_connection_errors = link.connection_errors.get();
            /// Sessions with an agent since the start. More than one means that a session was lost.
            counter agent_sessions = link.sessions.get();
            /// Revisions of DNS rules from the agent that came into force.
            counter dns_rules_applied = link.rules_applied.get();
            /// Revisions of DNS rules from the agent that the proxy refused. The previous revision
            /// stays in force. With FQDNData, revisions with rows that allow nothing count too.
            counter retrieve_dns_rules_errors = link.rules_refused.get();
            /// Rows of Cilium's rules that the proxy skipped, because they are malformed or for a
            /// transport other than UDP and TCP (protocol ANY includes SCTP). They are counted when
            /// their number changes.
            counter rule_rows_skipped = link.rows_skipped.get();
        }
    }

    fn outcomes(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let sink = self.shared.agent.sink.stats();
        let reports = self.shared.agent.reports.stats();
        families! { out;
            /// Answers released at once, because the agent had given a lease for each address, or a
            /// Cilium agent had acknowledged each address. If the same answer is repeated within
            /// 250 ms, it is not counted again.
            counter mapping_leased = sink.leased.get();
            /// Answers that waited until the agent had opened their addresses.
            counter mapping_held = sink.held.get();
            /// Answers released while no agent was connected. Their addresses open when the agent
            /// is back.
            counter mapping_agent_away = sink.agent_away.get();
            /// Answers released without waiting, because the agent had been late three times in a
            /// row. If the proxy had no CPU time to read a result, the result does not count as
            /// late.
            counter mapping_agent_hung = sink.agent_hung.get();
            /// Answers released before their addresses were open, because too many answers of the
            /// same pod waited for the agent.
            counter mapping_queue_full = sink.queue_full.get();
            /// Answers released before their addresses were open, because the agent took longer
            /// than the response max delay. The addresses open a moment later.
            counter mapping_late = sink.late.get();
            /// Mappings whose addresses the agent has opened.
            counter mapping_realised = sink.realised.get();
            /// Mappings that the agent refused or could not realise. With FQDNData, mappings that
            /// the agent did not answer within 5 s count too.
            counter fqdn_mapping_sync_errors = sink.refused.get();
            /// Mappings that the proxy sent again after an agent came back.
            counter mapping_replayed = sink.replayed.get();
            /// Leases that the agent revoked.
            counter mapping_revocations = sink.revocations.get();
            /// Reports of queries, answers and failures that the proxy sent to a Cilium agent for
            /// its log and metrics.
            counter agent_notices = reports.sent.get();
            /// Reports to a Cilium agent that the proxy dropped, because too many waited for the
            /// agent, or because too many came within a second.
            counter agent_notices_dropped = reports.dropped.get();
        }
    }

    fn files(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let journal = self.shared.agent.journal.stats();
        let log = &self.shared.logs.query_stats;
        families! { out;
            /// Journals of ended proxies that this proxy adopted.
            counter journal_adopted_files = journal.adopted_files.get();
            /// Pairs of name and address in adopted journals.
            counter journal_adopted_pairs = journal.adopted_pairs.get();
            /// Adopted journals with an incomplete last record, because their proxy was killed
            /// during a write.
            counter journal_torn_files = journal.torn.get();
            /// Journals that the proxy could not read and renamed to ….corrupt.
            counter journal_damaged_files = journal.damaged.get();
            /// Operations on journals that failed, for example because the disk was full or the
            /// directory not writable.
            counter journal_errors = journal.errors.get();
            /// Pairs of name and address that were not written to the journal, because too many
            /// pairs of the same pod waited for the disk.
            counter journal_skipped = journal.skipped.get();
            /// Lines written to the query log.
            counter query_log_lines = log.lines.get();
            /// Lines that are missing in the query log, because the proxy could not write it, or
            /// not fast enough.
            counter query_log_dropped = log.dropped.get();
            /// Failed attempts to write or open the query log.
            counter query_log_errors = log.errors.get();
        }
    }

    fn readiness(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let shared = &self.shared;
        families! { out;
            /// 1 while the proxy can serve. Otherwise /readyz lists the missing parts
            gauge sdp_ready = shared.ready.is_ready();
            /// 1 while a session with an agent is up
            gauge agent_connected = shared.agent.link.status().connection.is_some();
            /// 1 while answers do not wait for the agent, because the agent did not answer three
            /// mappings in a row
            gauge agent_hung = shared.agent.sink.status().agent_hung;
            /// Endpoints that have DNS rules. The proxy refuses the queries of all other endpoints
            gauge dns_rule_endpoints = shared.policy.load().len();
        }
    }

    fn connections(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let of = &self.shared.connections;
        let listeners = || [("admin", &of.admin), ("metrics", &of.metrics)].into_iter();
        families! { out;
            /// Open connections to the proxy's sockets for commands, probes and scrapes, by socket
            gauges listener_connections["listener"] =
                listeners().map(|(name, counts)| (name, counts.open()));
            /// Connections to these sockets that the proxy refused, or closed to make room for
            /// another connection
            counters listener_rejected["listener"] =
                listeners().map(|(name, counts)| (name, counts.rejected()));
        }?;
        if let Ok(open) = Descriptors::open() {
            families! { out;
                /// File descriptors (files, sockets, maps) that this process has open
                gauge open_descriptors = open;
            }?;
        }
        families! { out;
            /// File descriptors that this process may have open
            gauge max_descriptors = Descriptors::now().limit();
        }
    }

    fn mappings(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let sink = self.shared.agent.sink.status();
        families! { out;
            /// Pairs of name and address that the proxy keeps until the agent is back
            gauge mapping_kept = sink.kept;
            /// Pairs of name and address under a lease of the agent
            gauge mapping_leases = sink.leases;
            /// Mappings not sent to the agent yet
            gauge mapping_queued = sink.queued;
            /// Mappings sent to the agent that have no result yet
            gauge mapping_in_flight = sink.in_flight;
        }
    }

    fn journal(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let shared = &self.shared;
        let journal = shared.agent.journal.status();
        let damaged = || {
            shared
                .skipped_files
                .lock()
                .iter()
                .filter(|file| file.damaged)
                .count()
        };
        families! { out;
            /// Pairs of name and address in the journal, because no agent has made them durable
            gauge journal_pairs = journal.pairs;
            /// Length of the journal
            gauge journal_bytes = journal.bytes;
            /// 1 while the proxy cannot write its journal. If the proxy is killed while the agent
            /// is down, pairs are lost
            gauge journal_memory_only = journal.memory_only.is_some();
            /// Endpoint files (ep_config.json) that the proxy could not read when it started
            gauge damaged_files = damaged();
            /// Kept pairs of name and address that the proxy dropped because it kept too many. It
            /// drops pairs of the pod that has most of them
            counter mapping_dropped = shared.agent.sink.status().dropped;
            /// Pairs of name and address that are missing in the journal, because it had too many
            /// pairs, or because too many waited for the disk
            counter journal_dropped = journal.dropped;
        }
    }
}
