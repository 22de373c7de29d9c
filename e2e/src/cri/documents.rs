//! Documents about the tests' pods, and the agent's endpoints for them.

use std::net::IpAddr;

use anyhow::{Context, Result};
use serde_json::json;

use super::node::PodName;
use crate::lab::{Lab, web4};
use crate::netpol_run::NODE;
use crate::policy;

/// A rule that allows one server of the world: the server to which pods send allowed datagrams.
pub fn allowed_server() -> String {
    format!("- toCIDR: [\"{}/32\"]\n", web4(10))
}

/// A policy of pods `app: web` that allows only the server of [`allowed_server`].
pub fn only_allowed_server() -> String {
    policy::egress("web", "web", &allowed_server())
}

/// Describes exactly these pods to the agent, with their uids and the label `app: web`.
pub fn describe(lab: &Lab, pods: &[PodName]) -> Result<()> {
    let documents = pods.iter().map(|pod| {
        let PodName {
            namespace,
            name,
            uid,
            ..
        } = pod;
        format!(
            r"
apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: {namespace}, uid: {uid}, labels: {{app: web}}}}
---
"
        )
    });
    lab.write_policy("pods.yaml", &documents.collect::<String>())
}

/// Describes exactly these pods to `netpol run`, with their uids, known addresses and the label
/// `app: web`.
pub fn describe_on_node(lab: &Lab, pods: &[(PodName, Option<IpAddr>)]) -> Result<()> {
    let documents = pods.iter().map(|(pod, address)| {
        let PodName { namespace, name, uid, .. } = pod;
        let status = address.map(|address| json!({"phase": "Running", "podIP": address}));
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": namespace, "uid": uid, "labels": {"app": "web"}},
            "spec": {"nodeName": NODE},
            "status": status.unwrap_or_else(|| json!({"phase": "Pending"})),
        })
    });
    let documents: Vec<String> = documents.map(|document| document.to_string()).collect();
    lab.write_policy("pods.yaml", &documents.join("\n---\n"))
}

/// Writes a NetworkPolicy that lets these pods send to the allowed server and to nothing else.
pub fn only_allowed_server_by_address(lab: &Lab) -> Result<()> {
    let server = format!("{}/32", web4(10));
    let spec = json!({
        "podSelector": {"matchLabels": {"app": "web"}},
        "policyTypes": ["Egress"],
        "egress": [{"to": [{"ipBlock": {"cidr": server}}]}],
    });
    lab.write_network_policy("web", &spec)
}

/// Keys of the agent's endpoints.
pub fn endpoints(lab: &Lab) -> Result<Vec<String>> {
    let list = lab.agent_json(&["endpoint", "list"])?;
    let list = list.as_array().context("no list")?;
    let keys = list.iter().filter_map(|endpoint| endpoint["key"].as_str());
    Ok(keys.map(str::to_owned).collect())
}
