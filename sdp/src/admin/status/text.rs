//! `status` for people: one screen.

use std::fmt::{self, Write as _};

use super::{Counted, Status};
use crate::{
    link::state::{LinkStatus, RulesOrigin, Service, StateDirs},
    maps::MapsStatus,
    query_log::QueryLogStatus,
    recent_warnings::RecentWarning,
    rules_journal::RulesJournalStatus,
    transparent::Mode,
};

/// Maximum number of warnings shown. JSON has all of them.
const MAX_WARNINGS: usize = 6;

/// Lines of text, each with a label in front.
#[derive(Default)]
struct Page(String);

impl Page {
    fn line(&mut self, what: &str, text: impl fmt::Display) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "  {what:<11} {text}");
    }
}

impl Status {
    /// The status as one screen of text for a terminal.
    pub(crate) fn text(&self) -> String {
        let mut page = Page(format!(
            "{} ({}, pid {}, up {}): {}\n",
            self.name,
            self.version,
            self.pid,
            span(self.uptime_seconds),
            self.state(),
        ));
        for missing in &self.missing {
            page.line(
                "missing",
                format_args!("{}: {}", missing.need, missing.reason),
            );
        }
        page.line("listening", self.listening());
        page.line("steering", &self.steering.text);
        for replica in &self.replicas {
            page.line("replica", replica.text());
        }
        page.line("agent", agent_text(&self.agent));
        page.line("rules", self.rules());
        if let Some(refused) = &self.agent.refused_rules {
            page.line("refused", refused);
        }
        for skipped in &self.skipped_files {
            page.line(
                "skipped",
                format_args!("{}: {}", skipped.path.display(), skipped.reason),
            );
        }
        if self.transparent != Mode::Off {
            page.line("transparent", self.transparent.text());
        }
        page.line("maps", maps_text(&self.maps));
        page.line("mappings", self.mappings());
        page.line("journal", self.journal.text());
        if self.rules_journal.endpoints > 0 || self.rules_journal.problem.is_some() {
            page.line("", rules_journal_text(&self.rules_journal));
        }
        page.line("privileges", self.privileges.text());
        page.line("under way", self.under_way());
        page.line("queries", counts(&self.queries));
        page.line("answers", counts(&self.answers));
        if let Some(log) = &self.query_log {
            page.line("query log", query_log_text(log));
        }
        self.add_warnings(&mut page);
        page.0
    }

    fn state(&self) -> String {
        match (self.drain.since_ms, self.ready) {
            (Some(since), _) => format!(
                "leaving for {} ms, at most {} ms",
                since, self.drain.limit_ms
            ),
            (None, true) => "ready".to_owned(),
            (None, false) => "not ready".to_owned(),
        }
    }

    fn listening(&self) -> String {
        let addresses: Vec<_> = self.listeners.iter().map(ToString::to_string).collect();
        format!(
            "{}, UDP and TCP; {} UDP workers",
            addresses.join(" and "),
            self.workers
        )
    }

    fn rules(&self) -> String {
        let mut text = rules_text(&self.agent.rules);
        let endpoints = counted(self.endpoints_with_rules, "endpoint has", "endpoints have");
        let _ = write!(text, "; {endpoints} some");
        if let Some(revision) = self.agent.acked_revision {
            let _ = write!(text, "; acknowledged: {revision}");
        }
        if self.agent.kept_endpoints > 0 {
            let kept = self.agent.kept_endpoints;
            let _ = write!(
                text,
                "; of {kept} as before: the agent has not sent theirs yet"
            );
        }
        if self.agent.skipped_rows > 0 {
            let _ = write!(
                text,
                "; {} not about DNS over UDP or TCP",
                counted(self.agent.skipped_rows, "row is", "rows are")
            );
        }
        text
    }

    fn mappings(&self) -> String {
        let m = &self.mappings;
        let mut text = format!(
            "{} kept, {} leased, {} queued, {} in flight, {} dropped",
            m.kept, m.leases, m.queued, m.in_flight, m.dropped
        );
        if m.agent_hung {
            text.push_str("; the agent hangs: answers do not wait for it");
        }
        text
    }

    fn under_way(&self) -> String {
        let work = &self.under_way;
        format!(
            "{} queries in flight, {} answers held, {} TCP connections",
            work.in_flight, work.held, work.tcp_connections
        )
    }

    fn add_warnings(&self, page: &mut Page) {
        if self.troubles.is_empty() {
            page.line("troubles", "none logged");
        }
        for warning in self.troubles.iter().take(MAX_WARNINGS) {
            page.line("trouble", warning_text(warning));
        }
        let more = self.troubles.len().saturating_sub(MAX_WARNINGS);
        if more > 0 {
            page.line("trouble", format_args!("and {more} more (-o json)"));
        }
    }
}

fn query_log_text(log: &QueryLogStatus) -> String {
    let mut text = format!(
        "{} queries to {}: {} lines, {} dropped",
        log.which, log.target, log.lines, log.dropped
    );
    if log.one_in > 1 {
        let _ = write!(text, "; one in {}", log.one_in);
    }
    if let Some(problem) = &log.problem {
        let _ = write!(text, "; {problem}");
    }
    text
}

fn warning_text(warning: &RecentWarning) -> String {
    let RecentWarning {
        level,
        text,
        count,
        first,
        last,
    } = warning;
    match count {
        1 => format!("{last} {level}: {text}"),
        _ => format!("{last} {level}, {count} times since {first}: {text}"),
    }
}

fn counts(counted: &[Counted]) -> String {
    let all: Vec<_> = counted
        .iter()
        .map(|c| format!("{} {}", c.count, c.result))
        .collect();
    if all.is_empty() {
        "none".to_owned()
    } else {
        all.join(", ")
    }
}

fn span(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{minutes}m{}s", seconds % 60),
        3600..86_400 => format!("{hours}h{}m", minutes % 60),
        _ => format!("{days}d{}h", hours % 24),
    }
}

fn agent_text(agent: &LinkStatus) -> String {
    match (&agent.connection, &agent.last_error) {
        (Some(connection), _) => {
            let service = match connection.service {
                Service::Native => "native",
                Service::FqdnData => "FQDNData",
            };
            let mut text = format!(
                "connected to {} ({service}, version {}, start {}); session {}",
                connection.address,
                connection.agent_version,
                connection.epoch.start,
                agent.sessions
            );
            if let Some(port) = connection.other_proxy_port {
                let _ = write!(text, "; it redirects to port {port}, which is not ours");
            }
            if let Some(StateDirs { agent, own }) = &connection.other_state_dir {
                let _ = write!(
                    text,
                    "; its --state-dir is {agent}, and ours is {own}: a proxy that starts without the \
                     agent has no rules; give both the same --state-dir"
                );
            }
            text
        }
        (None, Some(error)) => format!("away: {error}"),
        (None, None) => "away".to_owned(),
    }
}

/// Source of the rules, in words.
pub(crate) fn rules_text(rules: &RulesOrigin) -> String {
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

fn rules_journal_text(journal: &RulesJournalStatus) -> String {
    let path = journal.path.as_deref().unwrap_or("no file");
    let mut text = format!("{path}: rules of {} endpoints", journal.endpoints);
    if let Some(problem) = &journal.problem {
        let _ = write!(text, "; not written: {problem}");
    }
    text
}

/// A number with its noun: "1 row", "2 rows".
fn counted(number: impl fmt::Display, one: &str, many: &str) -> String {
    let number = number.to_string();
    let noun = if number == "1" { one } else { many };
    format!("{number} {noun}")
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
    if maps.former_entries > 0 {
        parts.push(format!(
            "{} as before: the agent's new map or table lacks them yet",
            counted(maps.former_entries, "entry", "entries")
        ));
    }
    parts.join("; ")
}
