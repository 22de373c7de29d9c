//! Rules and tables as text: one rule in a line, so that two texts can be compared.

use netpol::{contiv::Flow, node::Node, pod::PodId, render::tables, rule::Rule};

/// The name of a node, for people.
pub(super) fn name(node: &str) -> &str {
    match node {
        "" => "without spec.nodeName",
        name => name,
    }
}

/// The rules of each pod, or of one pod only.
pub(super) fn rules(node: &Node, only: Option<&PodId>) -> String {
    let mut text = String::new();
    let pods = node
        .pods
        .iter()
        .filter(|(id, _)| only.is_none_or(|only| only == *id));
    for (id, pod) in pods {
        let addresses: Vec<String> = pod.addresses.iter().map(ToString::to_string).collect();
        text.push_str(&format!("pod {id} ({})\n", addresses.join(", ")));
        for (flow, verb) in [(Flow::Ingress, "receives"), (Flow::Egress, "sends")] {
            match pod.of(flow) {
                [] => text.push_str(&format!("  {verb}: not restricted\n")),
                rules => text.push_str(&format!("  {verb}:\n{}", lines(rules))),
            }
        }
    }
    text
}

/// The tables of a node, or only the tables that contain one pod.
pub(super) fn tables(node: &Node, only: Option<&PodId>) -> String {
    let mut text = String::new();
    for (rules, pods) in &node.tables.local {
        if only.is_some_and(|only| !pods.contains(only)) {
            continue;
        }
        let pods: Vec<String> = pods.iter().map(ToString::to_string).collect();
        let name = tables::name(rules);
        text.push_str(&format!(
            "table {name} to {}\n{}",
            pods.join(", "),
            lines(rules)
        ));
    }
    match (only, node.tables.global.as_ref()) {
        (Some(_), _) => {}
        (None, []) => text.push_str("table to other nodes: not restricted\n"),
        (None, rules) => text.push_str(&format!("table to other nodes\n{}", lines(rules))),
    }
    text
}

fn lines(rules: &[Rule]) -> String {
    rules.iter().map(|rule| format!("    {rule}\n")).collect()
}
