//! `status`: the state of a proxy. Programs read it, too: docs/src/observing.md lists the fields
//! that stay, and golden files show all fields.

mod text;

use std::{net::SocketAddr, time::Instant};

use serde::{Deserialize, Serialize};

pub(crate) use self::text::rules_text;
use super::{
    replicas::{self, Replica},
    steering::Steering,
};
use crate::{
    journal::JournalStatus,
    link::state::LinkStatus,
    maps::MapsStatus,
    privileges::Privileges,
    query_log::QueryLogStatus,
    recent_warnings::RecentWarning,
    restore::Skipped,
    rules_journal::RulesJournalStatus,
    shared_state::Shared,
    sink::SinkStatus,
    stats::{AnswerResult, Label, QueryResult},
    transparent::Mode,
};

/// Everything about one proxy. Newer fields have defaults, because a command of this release also
/// asks proxies of the previous release.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Status {
    /// Name of this instance (`--name`).
    pub name: String,
    pub version: String,
    pub pid: u32,
    pub uptime_seconds: u64,
    pub ready: bool,
    pub missing: Vec<Missing>,
    /// Whether the proxy drains and will exit.
    pub leaving: bool,
    pub drain: Draining,
    pub proxy_port: u16,
    /// Addresses on which the proxy listens, each over UDP and TCP.
    pub listeners: Vec<SocketAddr>,
    /// Number of UDP workers, each with a thread of its own.
    pub workers: usize,
    pub under_way: Work,
    pub agent: LinkStatus,
    /// Endpoints that have DNS rules.
    pub endpoints_with_rules: usize,
    pub maps: MapsStatus,
    pub mappings: SinkStatus,
    /// How packets are steered to this proxy.
    pub steering: Steering,
    /// Every proxy of this node that has steering slots.
    pub replicas: Vec<Replica>,
    /// Source address of queries to servers.
    pub transparent: Mode,
    /// Privileges that the process still has.
    pub privileges: Privileges,
    /// Endpoints' files that were not used at the start.
    pub skipped_files: Vec<Skipped>,
    /// State of the journal, which stores mappings that the agent has not made durable.
    pub journal: JournalStatus,
    /// State of the file with a Cilium agent's rules, for a start without the agent.
    pub rules_journal: RulesJournalStatus,
    /// The query log, if it is on.
    pub query_log: Option<QueryLogStatus>,
    /// Queries by outcome; outcomes that did not occur are left out.
    pub queries: Vec<Counted>,
    /// Answers by outcome; outcomes that did not occur are left out.
    pub answers: Vec<Counted>,
    /// Recent warnings and errors, the latest first.
    pub troubles: Vec<RecentWarning>,
}

/// Progress of a drain and its time limit.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Draining {
    /// Milliseconds since the drain began; `None` if there is no drain.
    pub since_ms: Option<u64>,
    /// Time limit of a drain, milliseconds.
    pub limit_ms: u64,
}

/// Numbers of queries, answers and connections that are not finished.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Work {
    /// Queries that wait for their server.
    pub in_flight: u64,
    /// Answers that wait for the agent.
    pub held: u64,
    /// Open TCP connections of clients.
    pub tcp_connections: u64,
}

/// A requirement for readiness that is not met.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Missing {
    /// Name of the requirement, for example `rules`.
    pub need: String,
    pub reason: String,
}

/// Number of queries or answers with one outcome.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Counted {
    /// Outcome, in the word that metrics use as the label's value.
    pub result: String,
    pub count: u64,
}

impl Status {
    /// Collects the present state of all parts of the proxy.
    pub(crate) fn of(shared: &Shared) -> Self {
        let missing = shared.ready.missing();
        let steering = Steering::of(&shared.steering.lock());
        Self {
            name: shared.config.name.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_seconds: shared.started.elapsed().as_secs(),
            ready: missing.is_empty(),
            missing: missing
                .into_iter()
                .map(|(need, reason)| Missing {
                    need: need.to_string(),
                    reason,
                })
                .collect(),
            leaving: shared.drain.is_leaving(),
            drain: Draining {
                since_ms: shared
                    .drain
                    .begun()
                    .map(|begun| millis(Instant::now().saturating_duration_since(begun))),
                limit_ms: millis(shared.config.flags.drain_timeout),
            },
            proxy_port: shared.config.flags.tofqdns_proxy_port,
            listeners: shared.config.listeners(),
            workers: shared.config.workers,
            under_way: Work {
                in_flight: shared.stats.in_flight.get(),
                held: shared.stats.held.get(),
                tcp_connections: shared.stats.tcp_connections.get(),
            },
            agent: shared.agent.link.status(),
            endpoints_with_rules: shared.policy.load().len(),
            maps: shared.maps.status(),
            mappings: shared.agent.sink.status(),
            replicas: replicas::replicas(&shared.config.flags.bpf_root, &steering.slots),
            steering,
            transparent: shared.transparent.mode(),
            privileges: shared.privileges.clone(),
            skipped_files: shared.skipped_files.lock().clone(),
            journal: shared.agent.journal.status(),
            rules_journal: shared.agent.rules_journal.status(),
            query_log: shared.logs.queries.as_ref().map(|log| log.status()),
            queries: counted::<QueryResult>(|label| shared.stats.queries.get(label)),
            answers: counted::<AnswerResult>(|label| shared.stats.answers.get(label)),
            troubles: shared.logs.recent_warnings.list(),
        }
    }
}

fn millis(span: std::time::Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

fn counted<L: Label>(get: impl Fn(L) -> u64) -> Vec<Counted> {
    L::ALL
        .iter()
        .map(|label| Counted {
            result: label.text().to_owned(),
            count: get(*label),
        })
        .filter(|counted| counted.count > 0)
        .collect()
}

#[cfg(test)]
mod tests;
