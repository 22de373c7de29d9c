//! The token of one agent changes nothing but the startup taint and the CiliumNode of its own node, and its
//! own part of statuses, Events and Leases.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use holdfast_e2e::apiserver::{NAMESPACE, Options, STARTUP_TAINT};
use serde_json::{Value, json};

use super::client::{Answer, Client};
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
        "metadata": {
            "name": name, "labels": {"app.kubernetes.io/managed-by": "holdfast-agent"},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": name, "uid": "1"}],
        },
        "spec": {"addresses": []},
    })
}

/// Checks that the admission policy `name` refused the request.
fn ensure_denied(answer: &Answer, name: &str, what: &str) -> Result<()> {
    let policy = format!("ValidatingAdmissionPolicy '{name}'");
    ensure!(
        answer.code == 403 && answer.text.contains(&policy),
        "{what}: {answer:?}"
    );
    Ok(())
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
            ensure_denied(&refused, "holdfast-agent-node", what)?;
        }
        // The agent's role has no other verb, and no right to the status.
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

        // Kubelets and controllers of nodes are not affected.
        let admin = Client::admin(&server)?;
        let cordon = admin
            .patch(N2, &json!({"spec": {"unschedulable": true}}))
            .await?;
        ensure!(cordon.code == 200, "{cordon:?}");
        Ok(())
    })
}

#[test]
fn the_token_of_an_agent_writes_the_cilium_node_of_its_node_alone() -> Result<()> {
    with_server(Options::with_startup_taint(Some("n1")), async |server| {
        let agent = Client::agent(&server)?;
        let mut of_another = cilium_node("n1");
        of_another["metadata"]["labels"] = json!({"a": "b"});
        let mut ownerless = cilium_node("n1");
        ownerless["metadata"]["ownerReferences"] = json!([]);
        for (what, object) in [
            ("that of another node", cilium_node("n2")),
            ("one under another program's label", of_another.clone()),
            ("one that no Node owns", ownerless),
        ] {
            let refused = agent.post(CILIUM_NODES, &object).await?;
            ensure_denied(&refused, "holdfast-agent-ciliumnode", what)?;
        }
        let own = agent.post(CILIUM_NODES, &cilium_node("n1")).await?;
        ensure!(own.code == 201, "{own:?}");
        server.put(cilium_node("n2"))?;
        let n2 = format!("{CILIUM_NODES}/n2");
        let other = agent.get(&n2).await?.body;
        let refused = agent.put(&n2, &other).await?;
        ensure_denied(&refused, "holdfast-agent-ciliumnode", "another node's")?;
        // Cilium's agent wrote the object of this node.
        server.put(of_another)?;
        let n1 = format!("{CILIUM_NODES}/n1");
        let mut taken = cilium_node("n1");
        let found = agent.get(&n1).await?.body;
        taken["metadata"]["resourceVersion"] = found["metadata"]["resourceVersion"].clone();
        let refused = agent.put(&n1, &taken).await?;
        ensure_denied(&refused, "holdfast-agent-ciliumnode", "another program's")
    })
}

#[test]
fn the_token_of_an_agent_writes_its_own_condition_of_a_policy_alone() -> Result<()> {
    with_server(Options::default(), async |server| {
        let others = json!({"type": "Enforced", "status": "True"});
        server.put(json!({
            "apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy",
            "metadata": {"name": "web", "namespace": "shop"}, "spec": {},
            "status": {"conditions": [others], "derivedPolicies": {"a": "b"}},
        }))?;
        let path = "/apis/cilium.io/v2/namespaces/shop/ciliumnetworkpolicies/web/status";
        let agent = Client::agent(&server)?;
        let refused = json!({"type": "Valid", "status": "False", "reason": "Refused"});
        let accepted = json!({"type": "Valid", "status": "True", "reason": "Accepted"});
        for (what, status) in [
            (
                "removes another condition",
                json!({"conditions": [refused]}),
            ),
            (
                "changes another condition",
                json!({"conditions": [{"type": "Enforced", "status": "False"}]}),
            ),
            (
                "accepts under another reason",
                json!({"conditions": [others, {"type": "Valid", "status": "True", "reason": "Fine"}]}),
            ),
            (
                "gives no reason",
                json!({"conditions": [others, {"type": "Valid", "status": "True"}]}),
            ),
            ("removes another field", json!({"derivedPolicies": null})),
            (
                "changes another field",
                json!({"derivedPolicies": {"a": "c"}}),
            ),
            ("adds a field", json!({"x": 1})),
        ] {
            let answer = agent.patch(path, &json!({"status": status})).await?;
            ensure_denied(&answer, "holdfast-reader-policies", what)?;
        }
        for condition in [refused, accepted] {
            let patch = json!({"status": {"conditions": [others, condition]}});
            let answer = agent.patch(path, &patch).await?;
            ensure!(answer.code == 200, "{answer:?}");
        }
        Ok(())
    })
}

#[test]
fn the_token_of_an_agent_writes_its_own_message_of_a_firewall_alone() -> Result<()> {
    const APPLIED: &str = "EgressFirewall Rules applied";
    with_server(Options::default(), async |server| {
        let zone = "zone-1: EgressFirewall Rules applied";
        server.put(json!({
            "apiVersion": "k8s.ovn.org/v1", "kind": "EgressFirewall",
            "metadata": {"name": "default", "namespace": "shop"}, "spec": {"egress": []},
            "status": {"status": APPLIED, "messages": [zone]},
        }))?;
        let path = "/apis/k8s.ovn.org/v1/namespaces/shop/egressfirewalls/default/status";
        let agent = Client::agent(&server)?;
        for (what, status) in [
            ("removes another message", json!({"messages": []})),
            (
                "writes in another's name",
                json!({"messages": [zone, "zone-2: EgressFirewall Rules applied"]}),
            ),
            ("another sentence", json!({"status": "fine"})),
            ("no sentence", json!({"status": null})),
        ] {
            let answer = agent.patch(path, &json!({"status": status})).await?;
            ensure_denied(&answer, "holdfast-reader-firewalls", what)?;
        }
        let ours = json!({"messages": [zone, format!("holdfast: {APPLIED}")]});
        let answer = agent.patch(path, &json!({"status": ours})).await?;
        ensure!(answer.code == 200, "{answer:?}");
        // An object without a status.
        server.put(json!({
            "apiVersion": "k8s.ovn.org/v1", "kind": "EgressFirewall",
            "metadata": {"name": "default", "namespace": "team"}, "spec": {"egress": []},
        }))?;
        let first = json!({"status": APPLIED, "messages": [format!("holdfast: {APPLIED}")]});
        let answer = agent
            .patch(&path.replace("shop", "team"), &json!({"status": first}))
            .await?;
        ensure!(answer.code == 200, "{answer:?}");
        Ok(())
    })
}

#[test]
fn the_token_of_an_agent_writes_no_event_of_another_program_and_no_other_lease() -> Result<()> {
    const EVENTS: &str = "/apis/events.k8s.io/v1/namespaces/shop/events";
    let event = |name: &str| {
        json!({
            "apiVersion": "events.k8s.io/v1", "kind": "Event",
            "metadata": {"name": name, "namespace": "shop"},
            "eventTime": "2026-01-01T00:00:00.000000Z", "type": "Warning", "reason": "Refused",
            "action": "Validate", "reportingController": "holdfast-agent",
            "reportingInstance": "n1", "note": "spec: bad",
            "regarding": {"kind": "CiliumNetworkPolicy", "namespace": "shop", "name": "web"},
        })
    };
    with_server(Options::default(), async |server| {
        let agent = Client::agent(&server)?;
        let with = |field: &str, value: &str| {
            let mut event = event("web.1");
            event[field] = json!(value);
            event
        };
        for event in [
            with("reportingController", "kubelet"),
            with("reason", "Scheduled"),
            with("type", "Normal"),
            with("action", "Kill"),
        ] {
            let refused = agent.post(EVENTS, &event).await?;
            ensure_denied(&refused, "holdfast-reader-events", "creates")?;
        }
        ensure!(agent.post(EVENTS, &event("web.1")).await?.code == 201);
        let mut foreign = with("reportingController", "kubelet");
        foreign["metadata"]["name"] = json!("web.2");
        server.put(foreign)?;
        let series =
            json!({"series": {"count": 2, "lastObservedTime": "2026-01-01T00:00:01.000000Z"}});
        for (what, name, patch) in [
            ("counts another's", "web.2", series.clone()),
            (
                "takes another's",
                "web.2",
                json!({"reportingController": "holdfast-agent"}),
            ),
            ("changes the note", "web.1", json!({"note": "spec: fine"})),
        ] {
            let refused = agent.patch(&format!("{EVENTS}/{name}"), &patch).await?;
            ensure_denied(&refused, "holdfast-reader-events", what)?;
        }
        let counted = agent.patch(&format!("{EVENTS}/web.1"), &series).await?;
        ensure!(counted.code == 200, "{counted:?}");

        let leases = format!("/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases");
        let lease = |name: &str| {
            json!({
                "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                "metadata": {"name": name}, "spec": {"holderIdentity": "n1"},
            })
        };
        let other = agent.post(&leases, &lease("kube-scheduler")).await?;
        ensure_denied(&other, "holdfast-leases", "another Lease")?;
        let own = agent.post(&leases, &lease("holdfast-refusals")).await?;
        ensure!(own.code == 201, "{own:?}");
        Ok(())
    })
}

#[test]
fn the_token_of_an_agent_creates_numbers_of_the_range_and_deletes_those_of_agents_alone()
-> Result<()> {
    const IDENTITIES: &str = "/apis/cilium.io/v2/ciliumidentities";
    const POLICY: &str = "holdfast-identities";
    let labelled = |name: &str, metadata: Value| {
        let mut object = json!({
            "apiVersion": "cilium.io/v2", "kind": "CiliumIdentity", "metadata": metadata,
            "security-labels": {"k8s:app": "web"},
        });
        object["metadata"]["name"] = json!(name);
        object
    };
    const LABELS: [(&str, &str); 1] = [("app.kubernetes.io/managed-by", "holdfast")];
    let labels = BTreeMap::from(LABELS);
    let ours = json!({"labels": labels, "annotations": {"holdfast.io/made-by": "holdfast"}});
    with_server(Options::default().and_identities(), async |server| {
        let agent = Client::agent(&server)?;
        let mut finalizer = ours.clone();
        finalizer["finalizers"] = json!(["example.org/x"]);
        let mut owned = ours.clone();
        owned["ownerReferences"] =
            json!([{"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "1"}]);
        for (what, object) in [
            ("below the range", labelled("255", ours.clone())),
            ("above the range", labelled("61440", ours.clone())),
            ("no number", labelled("a256", ours.clone())),
            ("a number in another form", labelled("0256", ours.clone())),
            ("no annotation", labelled("256", json!({"labels": labels}))),
            (
                "another annotation",
                labelled("256", json!({"annotations": {"holdfast.io/made-by": "x"}})),
            ),
            ("a finalizer", labelled("256", finalizer)),
            ("an owner", labelled("256", owned)),
        ] {
            let refused = agent.post(IDENTITIES, &object).await?;
            ensure_denied(&refused, POLICY, what)?;
        }
        for name in ["256", "61439"] {
            let created = agent
                .post(IDENTITIES, &labelled(name, ours.clone()))
                .await?;
            ensure!(created.code == 201, "{created:?}");
        }
        // The agent's role has no verb to change an identity, and the CRD keeps the labels of a
        // number as they are.
        let own = format!("{IDENTITIES}/256");
        let patch = json!({"security-labels": {"k8s:app": "db"}});
        let refused = agent.patch(&own, &patch).await?;
        ensure!(refused.code == 403, "{refused:?}");
        let refused = Client::admin(&server)?.patch(&own, &patch).await?;
        ensure!(
            refused.code == 422 && refused.text.contains("keeps its labels"),
            "{refused:?}"
        );

        // An object of Cilium, for a pod with the label of our objects.
        server.put(labelled("300", json!({"labels": labels})))?;
        let refused = agent
            .delete(&format!("{IDENTITIES}/300"), &Value::Null)
            .await?;
        ensure_denied(&refused, POLICY, "deletes another program's")?;
        let other = json!({"preconditions": {"uid": "another"}});
        let refused = agent.delete(&own, &other).await?;
        ensure!(refused.code == 409, "{refused:?}");
        let uid = agent.get(&own).await?.body["metadata"]["uid"].clone();
        let same = json!({"preconditions": {"uid": uid}});
        let deleted = agent.delete(&own, &same).await?;
        ensure!(deleted.code == 200, "{deleted:?}");
        ensure!(agent.get(&own).await?.code == 404);

        let leases = format!("/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases");
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {"name": "holdfast-identities"}, "spec": {"holderIdentity": "n1"},
        });
        let created = agent.post(&leases, &lease).await?;
        ensure!(created.code == 201, "{created:?}");
        Ok(())
    })
}

#[test]
fn without_the_mode_an_agent_may_not_read_identities() -> Result<()> {
    with_server(Options::default(), async |server| {
        let agent = Client::agent(&server)?;
        let refused = agent.get("/apis/cilium.io/v2/ciliumidentities").await?;
        ensure!(refused.code == 403, "{refused:?}");
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
