//! The table of `cluster status`, and the line that sums it up.

use super::rows::{Report, Row, State, Summary};
use crate::cli::{
    show::counted,
    table::{maybe, render},
};

/// Most characters of a problem in the table; `-o json` has all.
const CHARACTERS: usize = 160;

pub(super) fn text(report: &Report) -> String {
    let rows: Vec<Vec<String>> = report.nodes.iter().map(cells).collect();
    let mut text = render(
        &[
            "NODE",
            "VERSION",
            "SINCE",
            "READY",
            "ENDPOINTS",
            "REFUSED",
            "UNMANAGED",
            "STARTED OPEN",
            "PROBLEM",
        ],
        &rows,
    );
    text.push('\n');
    for unread in &report.unread {
        text.push_str(&format!("{unread}\n"));
    }
    text.push_str(&sum(&report.summary));
    text
}

fn cells(row: &Row) -> Vec<String> {
    let agent = row.agent.as_ref();
    let number = |value: Option<usize>| maybe(value.as_ref());
    let ready = agent.map(|agent| if agent.ready { "yes" } else { "no" });
    vec![
        row.node.clone(),
        maybe(agent.map(|agent| &agent.version)),
        maybe(row.since.as_ref()),
        maybe(ready.as_ref()),
        maybe(agent.map(|agent| &agent.endpoints)),
        maybe(agent.map(|agent| &agent.refused)),
        number(agent.map(|agent| agent.unmanaged.len())),
        number(agent.map(|agent| agent.started_open.len())),
        problem(row),
    ]
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
