//! The fields of nodes, pods and DaemonSets that are read here.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Label of the chart's pods with the name of the program that they run.
const NAME: &str = "app.kubernetes.io/name";
/// Value of that label for pods of `netpol run`, and the name of their container.
const NETPOL: &str = "holdfast-netpol";
/// JSON pointer in a pod's affinity: the node that the DaemonSet controller made the pod for.
const TARGET: &str = "/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution\
                      /nodeSelectorTerms/0/matchFields/0/values/0";

/// How a node enforces policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Enforcement {
    /// `run`: eBPF programs.
    Programs,
    /// `netpol run`: NetworkPolicies only.
    Nftables,
}

impl Enforcement {
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Programs => "programs",
            Self::Nftables => "nftables",
        }
    }

    /// Name of the agent's container in the pod.
    pub(super) const fn container(self) -> &'static str {
        match self {
            Self::Programs => "holdfast-agent",
            Self::Nftables => NETPOL,
        }
    }

    /// Arguments of the command that shows the agent's state.
    pub(super) const fn command(self) -> &'static [&'static str] {
        match self {
            Self::Programs => &["status"],
            Self::Nftables => &["netpol", "status"],
        }
    }
}

#[derive(Deserialize)]
pub(super) struct List<T> {
    pub(super) items: Vec<T>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Metadata {
    pub(super) name: String,
    pub(super) labels: BTreeMap<String, String>,
    pub(super) deletion_timestamp: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct CiliumNode {
    pub(super) metadata: Metadata,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Condition {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) status: String,
    pub(super) reason: String,
    pub(super) message: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Node {
    pub(super) metadata: Metadata,
    pub(super) spec: NodeSpec,
    pub(super) status: NodeStatus,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct NodeSpec {
    pub(super) taints: Vec<Taint>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Taint {
    pub(super) key: String,
    pub(super) value: String,
    pub(super) effect: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct NodeStatus {
    conditions: Vec<Condition>,
}

impl Node {
    /// Why the cluster does not consider the node ready; `None` if it is ready.
    pub(super) fn not_ready(&self) -> Option<String> {
        let mut conditions = self.status.conditions.iter();
        let ready = conditions.find(|one| one.kind == "Ready" && one.status != "True")?;
        Some(format!("the node is not ready: {}", ready.message))
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct DaemonSet {
    pub(super) spec: DaemonSetSpec,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct DaemonSetSpec {
    pub(super) template: Template,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Template {
    pub(super) spec: Placement,
}

/// Fields that decide on which nodes a DaemonSet has pods.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Placement {
    pub(super) node_selector: BTreeMap<String, String>,
    pub(super) tolerations: Vec<Toleration>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Toleration {
    pub(super) key: String,
    pub(super) operator: String,
    pub(super) value: String,
    pub(super) effect: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Pod {
    pub(super) metadata: Metadata,
    spec: PodSpec,
    status: PodStatus,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct PodSpec {
    node_name: Option<String>,
    affinity: Value,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct PodStatus {
    phase: String,
    message: String,
    conditions: Vec<Condition>,
    container_statuses: Vec<ContainerStatus>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ContainerStatus {
    name: String,
    restart_count: u64,
    state: ContainerState,
    last_state: ContainerState,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ContainerState {
    running: Option<Running>,
    waiting: Option<Stopped>,
    terminated: Option<Stopped>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Running {
    started_at: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Stopped {
    reason: String,
    message: String,
}

impl Stopped {
    fn text(&self) -> String {
        joined(&self.reason, &self.message)
    }
}

impl Pod {
    /// The node that the pod runs on or waits for.
    pub(super) fn node(&self) -> Option<&str> {
        let target = || self.spec.affinity.pointer(TARGET)?.as_str();
        self.spec.node_name.as_deref().or_else(target)
    }

    pub(super) fn enforcement(&self) -> Enforcement {
        match self.metadata.labels.get(NAME).map(String::as_str) {
            Some(NETPOL) => Enforcement::Nftables,
            _ => Enforcement::Programs,
        }
    }

    fn agent(&self) -> Option<&ContainerStatus> {
        let mut containers = self.status.container_statuses.iter();
        containers.find(|one| one.name == self.enforcement().container())
    }

    /// When the pod's agent started (RFC 3339); `None` if the agent does not run.
    pub(super) fn since(&self) -> Option<&str> {
        let running = self.agent()?.state.running.as_ref()?;
        Some(&running.started_at)
    }

    pub(super) fn restarts(&self) -> u64 {
        self.agent().map_or(0, |agent| agent.restart_count)
    }

    pub(super) fn is_running(&self) -> bool {
        self.since().is_some() && self.spec.node_name.is_some()
    }

    pub(super) fn is_ending(&self) -> bool {
        self.metadata.deletion_timestamp.is_some()
    }

    /// Why the pod's agent does not run, as far as the cluster knows.
    pub(super) fn stopped(&self) -> String {
        let mut conditions = self.status.conditions.iter();
        let unscheduled =
            conditions.find(|one| one.kind == "PodScheduled" && one.status == "False");
        let agent = self.agent();
        let state = agent.map(|agent| &agent.state);
        let now = state.and_then(|state| state.waiting.as_ref().or(state.terminated.as_ref()));
        let now = match (now, unscheduled) {
            (Some(now), _) => now.text(),
            (None, Some(one)) => joined(&one.reason, &one.message),
            (None, None) => joined(&self.status.phase, &self.status.message),
        };
        let last = agent.and_then(|agent| agent.last_state.terminated.as_ref());
        let last = last.map(|last| format!("; the last run ended: {}", last.text()));
        format!(
            "pod {} does not run: {now}{}",
            self.metadata.name,
            last.unwrap_or_default()
        )
    }
}

fn joined(reason: &str, message: &str) -> String {
    match message.trim() {
        "" => reason.to_owned(),
        message => format!("{reason}: {message}"),
    }
}
