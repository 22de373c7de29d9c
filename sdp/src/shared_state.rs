//! The state of the process, which its parts, the admin socket and the metrics read.

use std::{sync::Arc, time::Instant};

use daemon::{guests::ConnectionCounts, service_manager::ServiceManager};
use dns_policy::table::PolicyHandle;
use parking_lot::Mutex;

use crate::{
    config::Config,
    drain::Drain,
    gate::Gate,
    journal::Journal,
    link::state::LinkState,
    maps::PinnedMaps,
    privileges::Privileges,
    query_log::{QueryLog, QueryLogStats},
    query_report::QueryReports,
    ready::{Need, Readiness},
    recent_warnings::RecentWarnings,
    restore::Skipped,
    rules_journal::RulesJournal,
    sink::{Acknowledgements, LinkSink},
    stats::Stats,
    steering::SteeringStatus,
    transparent::Transparent,
};

/// State that every part of the process may read.
#[derive(Debug)]
pub struct Shared {
    pub config: Config,
    pub maps: Arc<PinnedMaps>,
    pub policy: Arc<PolicyHandle>,
    pub agent: AgentExchange,
    /// Conditions that are missing for readiness.
    pub ready: Readiness,
    /// Whether queries can be answered.
    pub gate: Gate,
    pub drain: Drain,
    /// The service manager that started this process.
    pub manager: ServiceManager,
    /// Counters of the main path.
    pub stats: Stats,
    /// Endpoints' files that were not used at the start.
    pub skipped_files: Mutex<Vec<Skipped>>,
    /// Source address of forwarded queries.
    pub transparent: Transparent,
    /// State of steering for this process.
    pub steering: Mutex<SteeringStatus>,
    /// Privileges of the process after its start.
    pub privileges: Privileges,
    pub logs: Logs,
    /// Connections of people and probes.
    pub connections: Connections,
    pub started: Instant,
}

/// Data for the agent and from it.
#[derive(Debug)]
pub struct AgentExchange {
    /// Sends mappings to the agent.
    pub sink: Arc<LinkSink>,
    /// File of the mappings that no agent has made durable.
    pub journal: Arc<Journal>,
    /// Reports of queries, which only a Cilium agent receives.
    pub reports: Arc<QueryReports>,
    /// File of a Cilium agent's rules, for a start without the agent.
    pub rules_journal: Arc<RulesJournal>,
    /// State of the link to the agent.
    pub link: Arc<LinkState>,
}

/// Output for people.
#[derive(Debug, Default)]
pub struct Logs {
    pub recent_warnings: RecentWarnings,
    /// The query log, if it is on.
    pub queries: Option<Arc<QueryLog>>,
    /// Counters of the query log; zero while it is off.
    pub query_stats: QueryLogStats,
}

/// Counters of the connections to the sockets for people and probes.
#[derive(Clone, Debug, Default)]
pub struct Connections {
    pub admin: ConnectionCounts,
    pub metrics: ConnectionCounts,
}

impl Shared {
    /// State of a proxy that is not running.
    pub(crate) fn idle(config: Config) -> Self {
        Self::new(
            config,
            Privileges::default(),
            Logs::default(),
            Gate::default(),
        )
    }

    pub(crate) fn new(config: Config, privileges: Privileges, logs: Logs, gate: Gate) -> Self {
        let ready = Readiness::default();
        ready.block(Need::Listeners, "not bound yet");
        ready.block(
            Need::Rules,
            "neither the agent nor a file has given any yet",
        );
        let maps = PinnedMaps::open(
            &config.flags.bpf_root,
            config.flags.enable_ipv4 && config.flags.enable_ipv6,
        );
        note_maps(&ready, &maps);
        let journal = Arc::new(Journal::default());
        let (min_ttl, max_delay) = (
            config.flags.tofqdns_min_ttl,
            config.flags.tofqdns_proxy_response_max_delay,
        );
        let acknowledgements = match config.flags.reuse_acknowledgements {
            true => Acknowledgements::Reused,
            false => Acknowledgements::CountOnce,
        };
        let sink = LinkSink::with_journal(min_ttl, max_delay, Arc::clone(&journal))
            .with_acknowledgements(acknowledgements);
        Self {
            maps: Arc::new(maps),
            policy: Arc::new(PolicyHandle::new()),
            agent: AgentExchange {
                sink: Arc::new(sink),
                journal,
                reports: Arc::default(),
                rules_journal: Arc::default(),
                link: Arc::new(LinkState::new(ready.clone())),
            },
            ready,
            gate,
            drain: Drain::default(),
            manager: ServiceManager::default(),
            stats: Stats::default(),
            skipped_files: Mutex::default(),
            transparent: Transparent::new(
                config.flags.dnsproxy_enable_transparent_mode,
                config.flags.transparent_mode_outside_cluster,
            ),
            steering: Mutex::new(SteeringStatus::Unavailable("not joined yet".to_owned())),
            privileges,
            logs,
            connections: Connections::default(),
            started: Instant::now(),
            config,
        }
    }
}

/// Notes whether the pinned maps can be read.
pub(crate) fn note_maps(ready: &Readiness, maps: &PinnedMaps) {
    match maps.problem() {
        Some(problem) => ready.block(Need::Endpoints, problem),
        None => ready.unblock(Need::Endpoints),
    }
}
