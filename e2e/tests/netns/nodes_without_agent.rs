//! A node that enforces policy without an agent is named by the agents of other nodes, until it has an
//! agent again or was taken out.
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::apiserver::{ApiServer, NAMESPACE, Options, pod};
use holdfast_e2e::{AgentOptions, Lab, eventually, with_lab};
use serde_json::{Value, json};

/// An agent names a node after 30 seconds.
const NAMED: Duration = Duration::from_secs(60);
const LEFT: &str = "holdfast.io/left";

fn cilium_node(name: &str, labels: Value) -> Value {
    let mut node = json!({
        "apiVersion": "cilium.io/v2", "kind": "CiliumNode",
        "metadata": {"name": name}, "spec": {"addresses": []},
    });
    node["metadata"]["labels"] = labels;
    node
}

fn managed() -> Value {
    json!({"app.kubernetes.io/managed-by": "holdfast-agent"})
}

fn left() -> Value {
    json!({"app.kubernetes.io/managed-by": "holdfast-agent", LEFT: "true"})
}

/// The pod of an agent.
fn agent_on(node: &str) -> Value {
    let labels = json!({"app.kubernetes.io/name": "holdfast-agent"});
    let mut pod = pod(
        NAMESPACE,
        &format!("holdfast-agent-{node}"),
        labels,
        node,
        &[],
    );
    pod["spec"]["hostNetwork"] = json!(true);
    pod
}

fn without_agent(lab: &Lab, expected: &[&str]) -> Result<()> {
    eventually(&format!("{expected:?} have no agent"), NAMED, || {
        let status = lab.agent_json(&["status"])?;
        let nodes = status["cluster"]["nodes_without_agent"].as_array();
        let nodes = nodes
            .into_iter()
            .flatten()
            .filter_map(|one| one["node"].as_str());
        let nodes: Vec<&str> = nodes.collect();
        ensure!(nodes == expected, "{nodes:?}");
        let counted = lab.metric(9962, "holdfast_kubernetes_nodes_without_agent", "")?;
        ensure!(counted == expected.len() as f64, "{counted}");
        Ok(())
    })
}

#[test]
fn a_node_without_an_agent_is_named_until_it_has_one_or_has_left() {
    with_lab(|lab| {
        let directory = lab.directory().join("apiserver");
        let api = ApiServer::start(Some(&lab.node), &directory, Options::default())?;
        for object in [
            json!({
                "apiVersion": "apps/v1", "kind": "DaemonSet",
                "metadata": {"name": "holdfast-agent", "namespace": NAMESPACE},
            }),
            json!({
                "apiVersion": "v1", "kind": "Node",
                "metadata": {"name": "n1"}, "status": {"addresses": []},
            }),
            // This node was taken out before, and is back.
            cilium_node("n1", left()),
            cilium_node("n2", managed()),
            cilium_node("n3", managed()),
            cilium_node("n4", left()),
            cilium_node("n5", json!({})),
            agent_on("n3"),
        ] {
            api.put(object)?;
        }
        let kubeconfig = api.files().kubeconfig.display();
        let options = AgentOptions::default()
            .flag("--kubernetes")
            .flag(&format!("--kubeconfig={kubeconfig}"))
            .flag("--node-name=n1")
            .flag("--daemonset=holdfast-agent");
        let _agent = lab.start_agent(&options)?;
        without_agent(lab, &["n2"])?;
        let text = lab.agent(&["status"])?;
        for says in [
            "no agent runs on n2",
            "holdfast-agent cleanup",
            "kubectl label ciliumnode",
        ] {
            ensure!(text.contains(says), "{text}");
        }
        let own = api.get("ciliumnodes", "", "n1")?.context("no CiliumNode")?;
        ensure!(own["metadata"]["labels"] == managed(), "{own}");

        api.put(agent_on("n2"))?;
        without_agent(lab, &[])?;
        // The agents of two nodes leave, as after a change of the nodes' labels.
        for node in ["n2", "n3"] {
            api.delete("pods", NAMESPACE, &format!("holdfast-agent-{node}"))?;
        }
        without_agent(lab, &["n2", "n3"])?;
        api.put(cilium_node("n2", left()))?;
        without_agent(lab, &["n3"])
    });
}
