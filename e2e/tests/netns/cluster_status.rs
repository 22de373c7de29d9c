//! `cluster status` with the real kubectl, which lists from an API server. No kubelet runs, so no
//! agent can be asked, and each row says why.
use std::process::{Command, Output};

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::apiserver::{ApiServer, NAMESPACE, Options, pod};
use holdfast_e2e::config;
use serde_json::{Value, json};

fn node(name: &str, arch: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/arch": arch}},
    })
}

fn agent(name: &str, node: &str) -> Value {
    let labels = json!({"app.kubernetes.io/name": "holdfast-agent"});
    let mut pod = pod(NAMESPACE, name, labels, node, &[]);
    pod["spec"]["containers"] = json!([{"name": "holdfast-agent", "image": "i"}]);
    pod["status"]["containerStatuses"] = json!([{
        "name": "holdfast-agent", "restartCount": 0,
        "state": {"running": {"startedAt": "2026-11-26T10:00:00Z"}},
    }]);
    pod
}

fn cluster() -> Result<(tempfile::TempDir, ApiServer)> {
    let directory = tempfile::tempdir()?;
    let api = ApiServer::start(None, directory.path(), Options::default())?;
    let selector = json!({"kubernetes.io/arch": "amd64"});
    let labels = json!({"app.kubernetes.io/name": "holdfast-agent"});
    for object in [
        node("n1", "amd64"),
        node("n2", "amd64"),
        node("n3", "arm64"),
        node("n4", "amd64"),
        agent("holdfast-agent-1", "n1"),
        pod("shop", "web", json!({"app": "web"}), "n2", &[]),
        json!({
            "apiVersion": "apps/v1", "kind": "DaemonSet",
            "metadata": {"namespace": NAMESPACE, "name": "holdfast-agent", "labels": labels},
            "spec": {"template": {"spec": {"nodeSelector": selector}}},
        }),
        json!({
            "apiVersion": "cilium.io/v2", "kind": "CiliumNode",
            "metadata": {"name": "n4", "labels": {"holdfast.io/left": "true"}},
        }),
    ] {
        api.put(object)?;
    }
    Ok((directory, api))
}

fn status(api: &ApiServer) -> Result<Output> {
    Command::new(config::program("holdfast-agent")?)
        .args(["cluster", "status", "-o", "json"])
        .arg(format!("--kubeconfig={}", api.files().admin.display()))
        .output()
        .context("start holdfast-agent")
}

#[test]
#[ignore = "needs kubectl, which Debian has only in an old version: cargo xtask test --tier nightly"]
fn kubectl_lists_the_nodes_and_each_row_says_why_there_is_no_answer() -> Result<()> {
    let (_directory, api) = cluster()?;
    let output = status(&api)?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(1), "{output:?}");
    ensure!(errors.contains("not every node is fine"), "{errors}");
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let row = |name: &str| {
        let nodes = report["nodes"].as_array();
        let mut nodes = nodes.into_iter().flatten();
        let row = nodes.find(|row| row["node"] == name);
        row.with_context(|| format!("no {name} in {report}"))
    };
    let asked = row("n1")?;
    ensure!(asked["pod"] == "holdfast-agent-1", "{asked}");
    ensure!(asked["since"] == "2026-11-26T10:00:00Z", "{asked}");
    let problem = asked["problems"][0].as_str().unwrap_or_default();
    ensure!(!problem.is_empty() && asked["agent"].is_null(), "{asked}");
    println!("kubectl exec: {problem}");
    let without = row("n2")?;
    ensure!(
        without["problems"] == json!(["no agent: no pod is there"]),
        "{without}"
    );
    for (name, reason) in [
        ("n3", "kubernetes.io/arch=amd64"),
        ("n4", "holdfast.io/left"),
    ] {
        let row = row(name)?;
        let excluded = row["excluded"].as_str().unwrap_or_default();
        ensure!(
            excluded.contains(reason) && row["state"] == "excluded",
            "{row}"
        );
    }
    Ok(())
}
