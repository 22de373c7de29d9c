//! Nodes, pods and answers, joined: one row for each node.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::{
    answer::{Agent, clean},
    objects::{DaemonSet, Enforcement, Node, Pod},
    placement,
};

/// The objects and answers that were read of a cluster.
#[derive(Default)]
pub(super) struct Cluster {
    pub(super) nodes: Vec<Node>,
    pub(super) pods: Vec<Pod>,
    pub(super) sets: Vec<DaemonSet>,
    /// Nodes that were taken out of the cluster's enforcement, and cleaned up.
    pub(super) left: BTreeSet<String>,
    /// The answers of running pods, by the pod's name.
    pub(super) answers: BTreeMap<String, Result<Agent, String>>,
    /// Objects that could not be listed, and why.
    pub(super) unread: Vec<String>,
}

impl Cluster {
    /// The pod that counts for each node. A pod that is ending counts only if its node has no other.
    fn pod_of_each_node(&self) -> BTreeMap<&str, &Pod> {
        let mut by_node: BTreeMap<&str, &Pod> = BTreeMap::new();
        let rank = |pod: &Pod| (pod.is_ending(), !pod.is_running());
        for pod in &self.pods {
            let Some(node) = pod.node() else { continue };
            let best = by_node.entry(node).or_insert(pod);
            if rank(pod) < rank(best) {
                *best = pod;
            }
        }
        by_node
    }

    /// Whether there are nodes without a pod.
    pub(super) fn lacks_pods(&self) -> bool {
        let pods = self.pod_of_each_node();
        let mut nodes = self.nodes.iter();
        nodes.any(|node| !pods.contains_key(node.metadata.name.as_str()))
    }
}

/// State of a node. Rows are sorted in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum State {
    Problem,
    Fine,
    /// The node deliberately has no agent.
    Excluded,
}

/// A line of the table: a node and what its agent said.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) node: String,
    pub(super) state: State,
    /// Pod of the agent.
    pub(super) pod: Option<String>,
    /// `None` if the node has no pod.
    pub(super) enforcement: Option<Enforcement>,
    /// When the agent started, RFC 3339.
    pub(super) since: Option<String>,
    /// How often the cluster started the agent again.
    pub(super) restarts: u64,
    /// `None` if the node has no agent, or if the agent did not answer.
    pub(super) agent: Option<Agent>,
    /// Problems that the agent reports, or why there is no answer.
    pub(super) problems: Vec<String>,
    /// Why the node deliberately has no agent.
    pub(super) excluded: Option<String>,
}

/// All rows, with their summary.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) nodes: Vec<Row>,
    pub(super) summary: Summary,
    /// Objects that could not be listed, and why: nodes may be missing.
    pub(super) unread: Vec<String>,
}

/// Counts of nodes, and sums over their agents.
#[derive(Debug, Default, Serialize)]
pub(super) struct Summary {
    pub(super) nodes: usize,
    pub(super) with_problems: usize,
    pub(super) excluded: usize,
    pub(super) endpoints: u64,
    /// The largest number among the agents, not the sum: agents refuse the same documents.
    pub(super) refused: u64,
    pub(super) unmanaged: usize,
    pub(super) started_open: usize,
    /// How many agents have each version.
    pub(super) versions: BTreeMap<String, usize>,
    /// Policies of kinds that some nodes cannot enforce, by kind.
    pub(super) not_enforced: BTreeMap<String, NotEnforced>,
}

/// Policies of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct NotEnforced {
    /// The largest number among the nodes, not the sum: nodes read the same policies.
    pub(super) policies: u64,
    /// Nodes that do not enforce them.
    pub(super) nodes: usize,
}

impl Report {
    pub(super) fn of(cluster: &Cluster) -> Self {
        let pods = cluster.pod_of_each_node();
        let nodes = cluster.nodes.iter();
        let nodes: BTreeMap<&str, &Node> = nodes
            .map(|node| (node.metadata.name.as_str(), node))
            .collect();
        let names: BTreeSet<&str> = nodes.keys().chain(pods.keys()).copied().collect();
        let row = |name: &str| match (pods.get(name), nodes.get(name)) {
            (Some(pod), node) => with_pod(cluster, name, pod, node.copied()),
            (None, node) => without_pod(cluster, name, node.copied()),
        };
        let mut rows: Vec<Row> = names.into_iter().map(row).collect();
        rows.sort_by(|a, b| a.state.cmp(&b.state).then_with(|| a.node.cmp(&b.node)));
        Self {
            summary: Summary::of(&rows),
            nodes: rows,
            unread: cluster.unread.clone(),
        }
    }

    /// Whether every object was listed, and each node has an agent without problems, or deliberately none.
    pub(super) fn is_fine(&self) -> bool {
        self.summary.with_problems == 0 && self.unread.is_empty()
    }
}

fn with_pod(cluster: &Cluster, name: &str, pod: &Pod, node: Option<&Node>) -> Row {
    let answer = cluster.answers.get(&pod.metadata.name);
    let mut row = Row {
        node: clean(name),
        state: State::Problem,
        pod: Some(clean(&pod.metadata.name)),
        enforcement: Some(pod.enforcement()),
        since: pod.since().map(clean),
        restarts: pod.restarts(),
        agent: None,
        problems: Vec::new(),
        excluded: None,
    };
    match answer {
        Some(Ok(agent)) => {
            if agent.is_fine() {
                row.state = State::Fine;
            }
            row.problems.clone_from(&agent.problems);
            row.agent = Some(agent.clone());
        }
        Some(Err(reason)) => row.problems.push(clean(reason)),
        None => row.problems.push(clean(&pod.stopped())),
    }
    if row.agent.is_none() {
        let not_ready = node.and_then(Node::not_ready);
        row.problems.extend(not_ready.as_deref().map(clean));
    }
    row
}

fn without_pod(cluster: &Cluster, name: &str, node: Option<&Node>) -> Row {
    let left = cluster.left.contains(name);
    let left = left.then(|| "taken out: its CiliumNode has the label holdfast.io/left".to_owned());
    let excluded = left.or_else(|| placement::excluded(node?, &cluster.sets));
    let (state, problems) = match &excluded {
        Some(_) => (State::Excluded, Vec::new()),
        None => (State::Problem, vec!["no agent: no pod is there".to_owned()]),
    };
    Row {
        node: clean(name),
        state,
        pod: None,
        enforcement: None,
        since: None,
        restarts: 0,
        agent: None,
        problems,
        excluded: excluded.as_deref().map(clean),
    }
}

impl Summary {
    fn of(rows: &[Row]) -> Self {
        let count = |state| rows.iter().filter(|row| row.state == state).count();
        let mut summary = Self {
            nodes: rows.len(),
            with_problems: count(State::Problem),
            excluded: count(State::Excluded),
            ..Self::default()
        };
        for agent in rows.iter().filter_map(|row| row.agent.as_ref()) {
            // Agents are untrusted, and a sum of their numbers may be too large.
            summary.endpoints = summary.endpoints.saturating_add(agent.endpoints);
            summary.refused = summary.refused.max(agent.refused);
            summary.unmanaged += agent.unmanaged.len();
            summary.started_open += agent.started_open.len();
            *summary.versions.entry(agent.version.clone()).or_default() += 1;
            for (kind, policies) in &agent.not_enforced {
                let of_kind = summary.not_enforced.entry(kind.clone()).or_default();
                of_kind.policies = of_kind.policies.max(*policies);
                of_kind.nodes += 1;
            }
        }
        summary
    }
}

#[cfg(test)]
mod tests;
