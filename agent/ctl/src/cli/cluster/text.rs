//! The table of `cluster status`, and the line that sums it up.

use daemon::command_line::table::{maybe, table};

use super::{
    answer::Agent,
    objects::Enforcement,
    rows::{NotEnforced, Report, Row, State, Summary},
};
use crate::cli::show::counted;

/// Maximum characters of a problem in the table; `-o json` shows more.
const CHARACTERS: usize = 160;

pub(super) fn text(report: &Report) -> String {
    let mut text = table(
        &report.nodes,
        [
            ("NODE", |row| row.node.clone()),
            ("VERSION", |row| {
                of_agent(row, |agent| agent.version.clone())
            }),
            ("BY", |row| {
                maybe(row.enforcement.map(Enforcement::as_str).as_ref())
            }),
            ("SINCE", |row| maybe(row.since.as_ref())),
            ("READY", |row| {
                of_agent(row, |agent| if agent.ready { "yes" } else { "no" })
            }),
            ("ENDPOINTS", |row| of_agent(row, |agent| agent.endpoints)),
            ("REFUSED", |row| of_agent(row, |agent| agent.refused)),
            ("UNMANAGED", |row| {
                of_agent(row, |agent| agent.unmanaged.len())
            }),
            ("STARTED OPEN", |row| {
                of_agent(row, |agent| agent.started_open.len())
            }),
            ("PROBLEM", problem),
        ],
    );
    text.push('\n');
    for unread in &report.unread {
        text.push_str(&format!("{unread}\n"));
    }
    for (kind, of_kind) in &report.summary.not_enforced {
        text.push_str(&not_enforced(kind, *of_kind));
    }
    text.push_str(&sum(&report.summary));
    text
}

/// A row for a kind of policy that some nodes cannot enforce.
fn not_enforced(kind: &str, NotEnforced { policies, nodes }: NotEnforced) -> String {
    format!(
        "{kind}: {} not enforced on {} (netpol run enforces NetworkPolicies only)\n",
        counted_u64(policies, "policy", "policies"),
        counted(nodes, "node", "nodes")
    )
}

/// A cell with a value of the agent's answer; `-` if there is no answer.
fn of_agent<T: ToString>(row: &Row, cell: fn(&Agent) -> T) -> String {
    maybe(row.agent.as_ref().map(cell).as_ref())
}

fn problem(row: &Row) -> String {
    let first = match (row.state, row.problems.first(), &row.excluded) {
        (State::Excluded, _, Some(reason)) => format!("no agent on purpose: {reason}"),
        (_, Some(first), _) => first.clone(),
        _ => return "-".to_owned(),
    };
    let mut short: String = first.chars().take(CHARACTERS).collect();
    if short.len() < first.len() {
        short.push('…');
    }
    match row.problems.len() {
        0 | 1 => short,
        many => format!("{short} (and {} more)", many - 1),
    }
}

fn sum(summary: &Summary) -> String {
    let fine = summary.nodes - summary.with_problems - summary.excluded;
    let versions = summary.versions.iter();
    let versions: Vec<String> = versions
        .map(|(version, nodes)| format!("{version} on {}", counted(*nodes, "node", "nodes")))
        .collect();
    format!(
        "{}: {fine} fine, {} with problems, {} without an agent on purpose. {} endpoints, \
         {} refused at most on a node, {} not under policy, {} started open. Versions: {}\n",
        counted(summary.nodes, "node", "nodes"),
        summary.with_problems,
        summary.excluded,
        summary.endpoints,
        counted_u64(summary.refused, "document", "documents"),
        counted(summary.unmanaged, "pod", "pods"),
        summary.started_open,
        if versions.is_empty() {
            "-".to_owned()
        } else {
            versions.join(", ")
        }
    )
}

fn counted_u64(number: u64, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}
