//! `status`: how a proxy is doing.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use super::steering::Steering;
use crate::{
    app::Shared,
    journal::JournalStatus,
    link::board::{LinkStatus, RulesOrigin},
    mapping::sink::SinkStatus,
    maps::MapsStatus,
    privileges::Privileges,
    proxy::stats::{AnswerResult, Label, QueryResult},
    restore::Skipped,
};

/// Everything about one proxy.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    /// Instance name.
    pub name: String,
    /// Version.
    pub version: String,
    /// Process.
    pub pid: u32,
    /// Since the start, seconds.
    pub uptime_seconds: u64,
    /// Whether nothing is missing.
    pub ready: bool,
    /// What is missing.
    pub missing: Vec<Missing>,
    /// Whether it is on its way out.
    pub leaving: bool,
    /// Port of the listeners.
    pub proxy_port: u16,
    /// Link to the agent.
    pub agent: LinkStatus,
    /// Endpoints that have DNS rules.
    pub endpoints_with_rules: usize,
    /// The pinned maps.
    pub maps: MapsStatus,
    /// Mappings and leases.
    pub mappings: SinkStatus,
    /// How packets are steered to this proxy.
    pub steering: Steering,
    /// What the process may still do.
    pub privileges: Privileges,
    /// Endpoints' files that were not used at the start.
    pub skipped_files: Vec<Skipped>,
    /// Where mappings that are not durable are kept.
    pub journal: JournalStatus,
    /// Queries by outcome; outcomes that did not occur are left out.
    pub queries: Vec<Counted>,
    /// Answers by outcome.
    pub answers: Vec<Counted>,
}

/// Something that is missing for being ready.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Missing {
    /// What.
    pub need: String,
    /// Why.
    pub reason: String,
}

/// One counter.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Counted {
    /// Of what.
    pub result: String,
    /// How many.
    pub count: u64,
}

impl Status {
    /// Takes stock.
    pub fn of(shared: &Shared) -> Self {
        let missing = shared.ready.missing();
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
            proxy_port: shared.config.proxy_port,
            agent: shared.board.status(),
            endpoints_with_rules: shared.policy.load().len(),
            maps: shared.maps.status(),
            mappings: shared.sink.status(),
            steering: Steering::of(&shared.steering.lock()),
            privileges: shared.privileges.clone(),
            skipped_files: shared.skipped_files.lock().clone(),
            journal: shared.journal.status(),
            queries: counted::<QueryResult>(|label| shared.stats.queries.get(label)),
            answers: counted::<AnswerResult>(|label| shared.stats.answers.get(label)),
        }
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let state = match (self.leaving, self.ready) {
            (true, _) => "leaving",
            (false, true) => "ready",
            (false, false) => "not ready",
        };
        let _ = writeln!(
            out,
            "{} ({}, pid {}, up {}s): {state}",
            self.name, self.version, self.pid, self.uptime_seconds
        );
        for missing in &self.missing {
            let _ = writeln!(out, "  missing     {}: {}", missing.need, missing.reason);
        }
        let _ = writeln!(out, "  agent       {}", agent_text(&self.agent));
        if let Some(refused) = &self.agent.refused_rules {
            let _ = writeln!(out, "  refused     {refused}");
        }
        let _ = writeln!(
            out,
            "  rules       {} ({} endpoints)",
            rules_text(&self.agent.rules),
            self.endpoints_with_rules
        );
        let _ = writeln!(out, "  maps        {}", maps_text(&self.maps));
        let m = &self.mappings;
        let _ = writeln!(
            out,
            "  mappings    {} kept, {} leased, {} queued, {} in flight, {} dropped{}",
            m.kept,
            m.leases,
            m.queued,
            m.in_flight,
            m.dropped,
            if m.agent_hung {
                "; the agent hangs"
            } else {
                ""
            }
        );
        let _ = writeln!(out, "  journal     {}", self.journal.text());
        let _ = writeln!(out, "  steering    {}", self.steering.text);
        let _ = writeln!(out, "  privileges  {}", self.privileges.text());
        let _ = writeln!(
            out,
            "  listening   127.0.0.1 and ::1, port {}",
            self.proxy_port
        );
        for (what, counts) in [("queries", &self.queries), ("answers", &self.answers)] {
            let all: Vec<_> = counts
                .iter()
                .map(|c| format!("{} {}", c.count, c.result))
                .collect();
            let text = if all.is_empty() {
                "none".to_owned()
            } else {
                all.join(", ")
            };
            let _ = writeln!(out, "  {what}     {text}");
        }
        for skipped in &self.skipped_files {
            let _ = writeln!(
                out,
                "  skipped     {}: {}",
                skipped.path.display(),
                skipped.reason
            );
        }
        out
    }
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

fn agent_text(agent: &LinkStatus) -> String {
    match (&agent.connection, &agent.last_error) {
        (Some(connection), _) => {
            let mut text = format!(
                "connected to {} (version {}, start {})",
                connection.address, connection.agent_version, connection.epoch.start
            );
            if let Some(port) = connection.other_proxy_port {
                let _ = write!(text, "; it redirects to port {port}, which is not ours");
            }
            text
        }
        (None, Some(error)) => format!("away: {error}"),
        (None, None) => "away".to_owned(),
    }
}

/// Where rules come from, in words.
pub fn rules_text(rules: &RulesOrigin) -> String {
    match rules {
        RulesOrigin::Nowhere => "none".to_owned(),
        RulesOrigin::Disk { endpoints } => format!("from disk, of {endpoints} endpoints"),
        RulesOrigin::Agent { epoch, revision } => {
            format!(
                "from the agent, revision {revision} of its start {}",
                epoch.start
            )
        }
    }
}

fn maps_text(maps: &MapsStatus) -> String {
    let mut parts = vec![format!("below {}", maps.root)];
    match (&maps.lxc_problem, &maps.ipcache) {
        (None, Some(ipcache)) => parts.push(format!("cilium_lxc and {ipcache} open")),
        (None, None) => parts.push("cilium_lxc open".to_owned()),
        (Some(problem), _) => parts.push(problem.clone()),
    }
    parts.extend(maps.ipcache_problem.clone());
    if maps.agent_tables {
        parts.push("the agent's tables serve in place of missing maps".to_owned());
    }
    parts.join("; ")
}
