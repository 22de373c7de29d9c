//! The token of one agent changes nothing but the startup taint and the CiliumNode of its own node.

use anyhow::{Result, ensure};
use holdfast_e2e::apiserver::{Options, STARTUP_TAINT};
use serde_json::{Value, json};

use super::client::Client;
use super::with_server;

const N1: &str = "/api/v1/nodes/n1";
const N2: &str = "/api/v1/nodes/n2";
const CILIUM_NODES: &str = "/apis/cilium.io/v2/ciliumnodes";

fn taints(others: &[&str], startup: bool) -> Value {
    let keys = others
        .iter()
        .copied()
        .chain(startup.then_some(STARTUP_TAINT));
    keys.map(|key| json!({"key": key, "effect": "NoSchedule"}))
        .collect()
}

fn node(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "labels": {"pool": "a"}, "annotations": {"a": "b"}},
        "spec": {"podCIDR": "10.244.1.0/24", "taints": taints(&["example.org/gpu"], true)},
    })
}

fn cilium_node(name: &str) -> Value {
    json!({
        "apiVersion": "cilium.io/v2", "kind": "CiliumNode",
        "metadata": {"name": name}, "spec": {"addresses": []},
    })
}

/// A JSON patch that sets the taints.
fn sets(taints: &Value) -> Value {
    json!([{"op": "replace", "path": "/spec/taints", "value": taints}])
}

#[test]
fn the_token_of_an_agent_removes_the_startup_taint_of_its_node_and_changes_nothing_else()
-> Result<()> {
    with_server(Options::with_startup_taint(Some("n1")), async |server| {
        for name in ["n1", "n2"] {
            server.put(node(name))?;
        }
        let agent = Client::agent(&server)?;
        let removes = taints(&["example.org/gpu"], false);
        for (what, path, patch) in [
            ("the taint of another node", N2, sets(&removes)),
            ("another taint, too", N1, sets(&taints(&[], false))),
            ("another taint only", N1, sets(&taints(&[], true))),
            (
                "a further taint",
                N1,
                sets(&taints(&["example.org/gpu", "x/y"], false)),
            ),
            (
                "a cordon",
                N1,
                json!({"spec": {"unschedulable": true, "taints": removes}}),
            ),
            (
                "a block",
                N1,
                json!({"spec": {"podCIDR": null, "taints": removes}}),
            ),
            (
                "a label",
                N1,
                json!({"metadata": {"labels": {"pool": "b"}}}),
            ),
            (
                "a further label",
                N1,
                json!({"metadata": {"labels": {"x": "y"}}}),
            ),
            (
                "an annotation",
                N1,
                json!({"metadata": {"annotations": null}}),
            ),
            (
                "a finalizer",
                N1,
                json!({"metadata": {"finalizers": ["x/y"]}}),
            ),
        ] {
            let refused = match patch.is_array() {
                true => agent.json_patch(path, &patch).await?,
                false => agent.patch(path, &patch).await?,
            };
            ensure!(refused.code == 403, "{what}: {refused:?}");
            ensure!(
                refused.text.contains("ValidatingAdmissionPolicy"),
                "{what}: {refused:?}"
            );
        }
        // Its role has no other verb, and no right to the status.
        for refused in [
            agent.put(N1, &node("n1")).await?,
            agent
                .patch(&format!("{N1}/status"), &json!({"status": {}}))
                .await?,
        ] {
            ensure!(refused.code == 403, "{refused:?}");
        }
        let own = agent.json_patch(N1, &sets(&removes)).await?;
        ensure!(
            own.code == 200 && own.body["spec"]["taints"] == removes,
            "{own:?}"
        );

        let other = agent.post(CILIUM_NODES, &cilium_node("n2")).await?;
        ensure!(other.code == 403, "{other:?}");
        let own = agent.post(CILIUM_NODES, &cilium_node("n1")).await?;
        ensure!(own.code == 201, "{own:?}");
        server.put(cilium_node("n2"))?;
        let other = agent.get(&format!("{CILIUM_NODES}/n2")).await?.body;
        let other = agent.put(&format!("{CILIUM_NODES}/n2"), &other).await?;
        ensure!(other.code == 403, "{other:?}");
        // Others are not affected: kubelets and controllers of nodes.
        let admin = Client::admin(&server)?;
        let cordon = admin
            .patch(N2, &json!({"spec": {"unschedulable": true}}))
            .await?;
        ensure!(cordon.code == 200, "{cordon:?}");
        Ok(())
    })
}

#[test]
fn a_test_of_a_json_patch_that_fails_changes_nothing() -> Result<()> {
    with_server(Options::default(), async |server| {
        server.put(node("n1"))?;
        let admin = Client::admin(&server)?;
        let patch = json!([
            {"op": "test", "path": "/spec/taints", "value": []},
            {"op": "remove", "path": "/spec/taints"},
        ]);
        let refused = admin.json_patch(N1, &patch).await?;
        ensure!(refused.code == 422, "{refused:?}");
        let found = admin.get(N1).await?.body;
        ensure!(found["spec"] == node("n1")["spec"], "{found}");
        Ok(())
    })
}
