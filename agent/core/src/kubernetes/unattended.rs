//! Nodes that enforce policy, although no agent runs there: for example nodes that
//! `agent.nodeSelector` of the chart does not select any more.
//!
//! A node has had an agent if its CiliumNode was written by one. Programs and maps stay in force when
//! that agent is gone. An administrator who takes the node out cleans it up, and sets the label
//! [`LEFT`] of its CiliumNode. This part does no input or output.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use crate::policy::document::{Body, PolicyDocument};

pub use crate::policy::cluster::node::{MANAGED_BY, US};

/// Label of the CiliumNode of a node that was taken out and cleaned up. An agent that starts there
/// removes it.
pub const LEFT: &str = "holdfast.io/left";
/// Label of the agents' pods, and its values: `holdfast-agent run`, which loads eBPF, and `netpol run`.
const APP: &str = "app.kubernetes.io/name";
const APPS: [&str; 2] = [US, "holdfast-netpol"];

/// The nodes, and the pods of agents.
#[derive(Debug)]
pub struct Unattended {
    /// This node, which has an agent.
    own: String,
    /// Namespace of the agents' pods.
    namespace: String,
    /// Nodes whose CiliumNode an agent wrote.
    nodes: BTreeSet<String>,
    /// Node of each agent's pod, by key of its document.
    agents: BTreeMap<Arc<str>, String>,
    changed: bool,
}

impl Unattended {
    /// Nodes without agents. The agents are in `namespace`, and `own` is the node of this agent.
    pub fn new(own: &str, namespace: &str) -> Self {
        Self {
            own: own.to_owned(),
            namespace: namespace.to_owned(),
            nodes: BTreeSet::new(),
            agents: BTreeMap::new(),
            changed: false,
        }
    }

    /// Takes a document, which replaces its former version.
    pub(crate) fn put(&mut self, document: &PolicyDocument) {
        match &document.body {
            Body::Node(node) => {
                let has = |key: &str| node.labels.get(key).map(String::as_str);
                let counts = document.key.starts_with("CiliumNode/")
                    && has(MANAGED_BY) == Some(US)
                    && has(LEFT).is_none()
                    && node.name != self.own;
                self.changed |= match counts {
                    true => self.nodes.insert(node.name.clone()),
                    false => self.nodes.remove(&node.name),
                };
            }
            Body::Pod(pod) => {
                let is_agent = pod.namespace == self.namespace
                    && pod
                        .labels
                        .get(APP)
                        .is_some_and(|app| APPS.contains(&app.as_str()));
                match pod.node.as_ref().filter(|_| is_agent) {
                    Some(node) => {
                        let key = document.key.as_str().into();
                        let before = self.agents.insert(key, node.clone());
                        self.changed |= before.as_ref() != Some(node);
                    }
                    None => self.remove(&document.key),
                }
            }
            _ => {}
        }
    }

    /// Removes the document of this key.
    pub(crate) fn remove(&mut self, key: &str) {
        self.changed |= match key.strip_prefix("CiliumNode/") {
            Some(node) => self.nodes.remove(node),
            None => self.agents.remove(key).is_some(),
        };
    }

    /// The nodes without an agent, if they may have changed since the last call.
    pub(crate) fn take(&mut self) -> Option<BTreeSet<String>> {
        std::mem::take(&mut self.changed).then(|| {
            let attended: BTreeSet<&String> = self.agents.values().collect();
            let nodes = self.nodes.iter();
            nodes
                .filter(|node| !attended.contains(node))
                .cloned()
                .collect()
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::policy::parse::parse_object;

    fn put(all: &mut Unattended, value: &Value) {
        let document = parse_object(value, "test").unwrap();
        all.put(&document);
    }

    fn node(name: &str, labels: &Value) -> Value {
        json!({
            "apiVersion": "cilium.io/v2", "kind": "CiliumNode",
            "metadata": {"name": name, "labels": labels},
            "spec": {"addresses": []},
        })
    }

    fn agent(namespace: &str, name: &str, app: &str, node: &str) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"namespace": namespace, "name": name, "labels": {APP: app}},
            "spec": {"nodeName": node, "hostNetwork": true},
        })
    }

    fn names(all: &mut Unattended) -> Vec<String> {
        all.take().unwrap().into_iter().collect()
    }

    #[test]
    fn a_node_of_an_agent_without_an_agents_pod_is_named_until_it_left() {
        let mut all = Unattended::new("n1", "kube-system");
        assert_eq!(all.take(), None);
        for name in ["n1", "n2", "n3"] {
            put(&mut all, &node(name, &json!({MANAGED_BY: US})));
        }
        // The node belongs to another program.
        put(&mut all, &node("n4", &json!({})));
        put(&mut all, &agent("kube-system", "a", US, "n3"));
        assert_eq!(names(&mut all), ["n2"]);
        assert_eq!(all.take(), None);
        // Pods that are no agents: another program's, and one of another namespace.
        put(&mut all, &agent("kube-system", "b", "holdfast-sdp", "n2"));
        put(&mut all, &agent("default", "c", US, "n2"));
        assert!(all.take().is_none_or(|nodes| nodes.contains("n2")));
        put(&mut all, &agent("kube-system", "d", US, "n2"));
        assert!(names(&mut all).is_empty());
        all.remove("Pod/kube-system/d");
        assert_eq!(names(&mut all), ["n2"]);
        put(
            &mut all,
            &node("n2", &json!({MANAGED_BY: US, LEFT: "true"})),
        );
        assert!(names(&mut all).is_empty());
        // A node is taken out: first the agent's pod is gone, and then the CiliumNode.
        all.remove("Pod/kube-system/a");
        assert_eq!(names(&mut all), ["n3"]);
        all.remove("CiliumNode/n3");
        assert!(names(&mut all).is_empty());
    }
}
