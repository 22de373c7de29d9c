//! State of the link, for readiness, `status` and metrics.

use std::time::Instant;

use dns_policy::epoch::Epoch;
use parking_lot::{Mutex, MutexGuard};

use crate::{
    gate::SentRules,
    kept_rules::KeptRules,
    ready::{Need, Readiness},
    stats::Count,
};

/// Source of the rules in force.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case", tag = "from")]
pub enum RulesOrigin {
    /// There are no rules, so everything is refused.
    #[default]
    Nowhere,
    /// The endpoints' files. The agent has not sent any rules yet.
    Disk {
        /// Number of endpoints whose rules were read from files.
        endpoints: usize,
    },
    /// The agent has sent them in this run of the proxy.
    Agent {
        epoch: Epoch,
        /// Revision of the policy that the rules belong to.
        revision: u64,
    },
}

/// Service that an agent offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Service {
    /// `holdfast.fqdn.v1.FqdnPolicy`.
    Native,
    /// `standalonednsproxy.FQDNData`.
    FqdnData,
}

/// A live session with an agent.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Connection {
    /// Address of the agent, as in `--agent-address`.
    pub address: String,
    pub service: Service,
    /// Version from the agent's hello.
    pub agent_version: String,
    pub epoch: Epoch,
    /// Port to which the agent redirects queries, if it is not the port of this proxy.
    pub other_proxy_port: Option<u16>,
    /// The two state directories, where they differ.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other_state_dir: Option<StateDirs>,
}

/// State directories of an agent and its proxy, each with the path that its program uses.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct StateDirs {
    /// The `--state-dir` that the agent reported.
    pub agent: String,
    /// The `--state-dir` of this proxy.
    pub own: String,
}

/// State of the link, for `status`.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct LinkStatus {
    /// The session, if there is one.
    pub connection: Option<Connection>,
    /// Why there is no session, or why the last one ended.
    pub last_error: Option<String>,
    /// Number of sessions since the process started.
    pub sessions: u64,
    /// Source of the rules in force.
    pub rules: RulesOrigin,
    /// The last revision that was acknowledged in this session.
    pub acked_revision: Option<u64>,
    /// The last revision that was refused, and why.
    pub refused_rules: Option<String>,
    /// Endpoints whose rules are in force although the agent has not sent them in this session.
    pub kept_endpoints: usize,
    /// Rows of Cilium's rules that were passed over: their transport is neither UDP nor TCP.
    pub skipped_rows: u64,
}

/// Counters of the link since the process started.
#[derive(Clone, Debug, Default)]
pub struct LinkStats {
    /// Attempts that found no agent.
    pub connection_errors: Count,
    /// Sessions that were established with an agent.
    pub sessions: Count,
    /// Revisions of rules that were put in force.
    pub rules_applied: Count,
    /// Revisions of rules refused, whole or in part.
    pub rules_refused: Count,
    /// Rows of rules passed over, because their transport is neither UDP nor TCP, or because they
    /// cannot be read.
    pub rows_skipped: Count,
}

/// State of the link to the agent, which several threads read and change.
#[derive(Debug)]
pub struct LinkState {
    status: Mutex<LinkStatus>,
    stats: LinkStats,
    ready: Readiness,
    writer: Mutex<KeptRules>,
    sent_rules: Mutex<SentRules>,
}

impl LinkState {
    /// A state without rules. It tells `ready` when there are rules.
    pub fn new(ready: Readiness) -> Self {
        Self {
            status: Mutex::default(),
            stats: LinkStats::default(),
            ready,
            writer: Mutex::default(),
            sent_rules: Mutex::new(SentRules::None),
        }
    }

    pub fn status(&self) -> LinkStatus {
        self.status.lock().clone()
    }

    pub fn stats(&self) -> &LinkStats {
        &self.stats
    }

    /// Whether the agent has sent rules since this process started.
    pub fn has_agent_rules(&self) -> bool {
        matches!(self.status.lock().rules, RulesOrigin::Agent { .. })
    }

    /// The lock that is held while rules are put in force, so that rules from disk never replace
    /// the agent's.
    pub fn writing_rules(&self) -> MutexGuard<'_, KeptRules> {
        self.writer.lock()
    }

    /// Notes that rules of `endpoints` endpoints were read from disk.
    pub fn rules_from_disk(&self, endpoints: usize) {
        let mut status = self.status.lock();
        if !matches!(status.rules, RulesOrigin::Agent { .. }) && endpoints > 0 {
            status.rules = RulesOrigin::Disk { endpoints };
            drop(status);
            self.ready.unblock(Need::Rules);
        }
    }

    pub(super) fn rules_from_agent(&self, epoch: Epoch, revision: u64) {
        let mut status = self.status.lock();
        status.rules = RulesOrigin::Agent { epoch, revision };
        status.refused_rules = None;
        let service = status.connection.as_ref().map(|c| c.service);
        self.note_word(service);
        drop(status);
        self.stats.rules_applied.add(1);
        self.ready.unblock(Need::Rules);
    }

    /// Notes how many endpoints keep rules that the agent has not sent.
    pub fn rules_kept(&self, endpoints: usize) {
        self.status.lock().kept_endpoints = endpoints;
    }

    fn note_word(&self, service: Option<Service>) {
        let mut sent_rules = self.sent_rules.lock();
        *sent_rules = match (*sent_rules, service) {
            (SentRules::None, Some(Service::FqdnData)) => SentRules::State(Instant::now()),
            (_, Some(Service::Native)) => SentRules::Whole,
            (sent_rules, _) => sent_rules,
        };
    }

    /// How much of its rules the agent has sent.
    pub fn sent_rules(&self) -> SentRules {
        *self.sent_rules.lock()
    }

    /// Notes how many rows of rules were passed over, in the last state or in the files.
    pub fn rows_skipped(&self, rows: u64) {
        let mut status = self.status.lock();
        if status.skipped_rows != rows {
            self.stats.rows_skipped.add(rows);
        }
        status.skipped_rows = rows;
    }

    /// Notes that a revision was refused, whole or in part.
    pub(super) fn rules_refused(&self, revision: u64, reason: &str) {
        self.rules_refused_still(revision, reason);
        self.stats.rules_refused.add(1);
    }

    /// Notes that a revision was refused for the same reason as the one before it, and does not
    /// count it again.
    pub(super) fn rules_refused_still(&self, revision: u64, reason: &str) {
        self.status.lock().refused_rules = Some(format!("revision {revision}: {reason}"));
    }

    /// Notes that the proxy has acknowledged the revision to the agent.
    pub(super) fn acked(&self, revision: u64) {
        self.status.lock().acked_revision = Some(revision);
    }

    pub(super) fn sessions(&self) -> u64 {
        self.status.lock().sessions
    }

    pub(super) fn connected(&self, connection: Connection) {
        let mut status = self.status.lock();
        status.connection = Some(connection);
        status.last_error = None;
        status.acked_revision = None;
        status.sessions += 1;
        drop(status);
        self.stats.sessions.add(1);
    }

    pub(super) fn disconnected(&self, reason: &str) {
        let mut sent_rules = self.sent_rules.lock();
        if matches!(*sent_rules, SentRules::State(_)) {
            *sent_rules = SentRules::None;
        }
        drop(sent_rules);
        let mut status = self.status.lock();
        status.connection = None;
        status.acked_revision = None;
        status.last_error = Some(reason.to_owned());
    }

    /// Notes that an attempt at every address found no agent.
    pub(super) fn nobody(&self, errors: &[String]) {
        if errors.is_empty() {
            return;
        }
        let text = errors.join("; ");
        let mut status = self.status.lock();
        let news = status.last_error.as_ref() != Some(&text);
        status.last_error = Some(text);
        drop(status);
        self.stats.connection_errors.add(1);
        if news {
            tracing::debug!(?errors, "cannot connect to an agent");
        }
    }
}
