//! The CiliumNode of this node, against a server that gives scripted answers.

use super::*;
use crate::api::scripted::{Server, refusal};

fn node() -> Value {
    json!({
        "metadata": {"name": "n1", "uid": "u", "labels": {"region": "east"}},
        "spec": {"podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24"]},
        "status": {"addresses": [
            {"type": "InternalIP", "address": "192.0.2.1"},
            {"type": "ExternalIP", "address": "198.51.100.1"},
            {"type": "Hostname", "address": "n1"},
        ]},
    })
}

fn addresses(all: &[&str]) -> BTreeSet<IpAddr> {
    all.iter().map(|text| text.parse().unwrap()).collect()
}

fn own_node(server: &Server) -> OwnNode {
    OwnNode {
        api: server.api.clone(),
        name: "n1".to_owned(),
        high_scale: None,
    }
}

#[test]
fn the_object_has_every_address_of_the_node_with_its_type_and_belongs_to_the_node() {
    let own = reachable(&addresses(&[
        "127.0.0.1",
        "::1",
        "fe80::1",
        "192.0.2.1",
        "10.244.1.1",
    ]));
    let wanted = wanted("n1", &node(), &own);
    let all = json!([
        {"type": "CiliumInternalIP", "ip": "10.244.1.1"},
        {"type": "InternalIP", "ip": "192.0.2.1"},
        {"type": "ExternalIP", "ip": "198.51.100.1"},
    ]);
    assert_eq!(wanted["spec"]["addresses"], all);
    assert_eq!(wanted["spec"]["ipam"]["podCIDRs"], json!(["10.244.1.0/24"]));
    let owner = &wanted["metadata"]["ownerReferences"][0];
    assert_eq!(
        (&owner["kind"], &owner["uid"]),
        (&json!("Node"), &json!("u"))
    );
}

#[test]
fn high_scale_mode_of_the_node_comes_and_goes_with_the_flag() {
    let own = addresses(&["192.0.2.1"]);
    let without = wanted("n1", &node(), &own);
    let mut with = without.clone();
    with["metadata"]["annotations"] = json!({HIGH_SCALE: "full"});
    let mut found = without.clone();
    found["metadata"]["annotations"] = json!({"other": "stays"});
    let turned_on = merged(&found, &with, None).unwrap();
    let expected = json!({"other": "stays", HIGH_SCALE: "full"});
    assert_eq!(turned_on["metadata"]["annotations"], expected);
    assert_eq!(merged(&turned_on, &with, None), None);
    let turned_off = merged(&turned_on, &without, None).unwrap();
    assert_eq!(
        turned_off["metadata"]["annotations"],
        json!({"other": "stays"})
    );
}

#[test]
fn it_is_written_only_if_it_differs_and_keeps_what_others_added() {
    let own = addresses(&["192.0.2.1"]);
    let wanted_now = wanted("n1", &node(), &own);
    let mut found = wanted_now.clone();
    found["metadata"]["resourceVersion"] = json!("7");
    found["spec"]["health"] = json!({"ipv4": "10.244.1.9"});
    assert_eq!(merged(&found, &wanted_now, None), None);
    let later = wanted("n1", &node(), &addresses(&["192.0.2.1", "192.0.2.2"]));
    let merged_now = merged(&found, &later, None).unwrap();
    assert_eq!(merged_now["spec"]["addresses"], later["spec"]["addresses"]);
    assert_eq!(merged_now["spec"]["health"], found["spec"]["health"]);
    assert_eq!(merged_now["metadata"]["resourceVersion"], "7");
}

#[test]
fn one_that_another_program_made_is_left_alone() {
    let wanted = wanted("n1", &node(), &addresses(&["192.0.2.1"]));
    let found = json!({"metadata": {"name": "n1"}, "spec": {"addresses": []}});
    assert_eq!(merged(&found, &wanted, None), None);
}

#[test]
fn labels_of_the_node_are_copied_and_an_object_of_another_program_keeps_its_own() {
    let own = addresses(&["192.0.2.1"]);
    let wanted_now = wanted("n1", &node(), &own);
    let labels = labels::of_node(&node());
    let copied = merged(&wanted_now, &wanted_now, Some(&labels)).unwrap();
    let all = json!({MANAGED_BY: US, "region": "east"});
    assert_eq!(copied["metadata"]["labels"], all);
    assert_eq!(merged(&copied, &wanted_now, Some(&labels)), None);
    // The labels cannot be copied at present: labels that were copied earlier stay.
    assert_eq!(merged(&copied, &wanted_now, None), None);
    let none = merged(&copied, &wanted_now, Some(&Labels::new())).unwrap();
    assert_eq!(none["metadata"]["labels"], json!({MANAGED_BY: US}));
    let mut of_cilium = copied.clone();
    of_cilium["metadata"]["labels"] = json!({"region": "north"});
    assert_eq!(merged(&of_cilium, &wanted_now, Some(&labels)), None);
}

#[tokio::test]
async fn labels_that_are_too_many_are_named_and_the_rest_is_written() {
    let own = addresses(&["192.0.2.1"]);
    let keys = (0..500).map(|at| format!("{at:0>300}"));
    let many: Labels = keys.map(|key| (key, String::new())).collect();
    let mut large = node();
    large["metadata"]["labels"] = json!(many);
    let server = Server::start(vec![
        (200, large.to_string()),
        refusal(404, "not found"),
        (201, "{}".to_owned()),
    ])
    .await;
    let written = write(&own_node(&server), &own).await.unwrap();
    let reason = written.labels_left_out.unwrap();
    assert!(reason.contains("remove labels of the Node"), "{reason}");
    assert!(written.has_blocks);
}

#[tokio::test]
async fn it_is_created_once_and_then_only_looked_at() {
    let own = addresses(&["192.0.2.1"]);
    let mut as_it_is = wanted("n1", &node(), &own);
    labels::copy(&mut as_it_is, &labels::of_node(&node()));
    let as_it_is = (200, as_it_is.to_string());
    let node = (200, node().to_string());
    let server = Server::start(vec![
        node.clone(),
        refusal(404, "not found"),
        (201, "{}".to_owned()),
        node,
        as_it_is,
    ])
    .await;
    for _ in 0..2 {
        let written = write(&own_node(&server), &own).await.unwrap();
        assert!(written.has_blocks);
    }
    let one = "/apis/cilium.io/v2/ciliumnodes/n1";
    let wanted = [
        "GET /api/v1/nodes/n1".to_owned(),
        format!("GET {one}"),
        "POST /apis/cilium.io/v2/ciliumnodes".to_owned(),
        "GET /api/v1/nodes/n1".to_owned(),
        format!("GET {one}"),
    ];
    assert_eq!(server.requests.lock()[1..], wanted);
}

#[tokio::test]
async fn what_is_missing_is_named_with_its_remedy() {
    let own = addresses(&["192.0.2.1"]);
    let found = (200, node().to_string());
    let forbidden = || refusal(403, "forbidden");
    for (answers, text) in [
        (
            vec![refusal(404, "no node")],
            "--node-name n1: the cluster has no Node",
        ),
        (vec![forbidden()], "the verb get on nodes is missing"),
        (
            vec![found.clone(), refusal(404, "none"), forbidden()],
            "the verb create on ciliumnodes.cilium.io is missing",
        ),
        (
            vec![found.clone(), refusal(404, "none"), refusal(404, "none")],
            "install the CRDs (chart value crds.install)",
        ),
    ] {
        let server = Server::start(answers).await;
        let error = write(&own_node(&server), &own).await.unwrap_err();
        assert!(error.contains(text), "{error}");
    }
}

#[tokio::test]
async fn labels_are_followed_and_a_missing_right_is_named_until_it_is_there() {
    let event = |kind: &str, labels: &Value| {
        let object = json!({"metadata": {"name": "n1", "labels": labels}});
        format!("{}\n", json!({"type": kind, "object": object}))
    };
    let (east, west) = (json!({"region": "east"}), json!({"region": "west"}));
    let server = Server::start(vec![
        refusal(403, "forbidden"),
        (200, event("ADDED", &east)),
        (200, event("ADDED", &east)),
        (200, event("ADDED", &east) + &event("MODIFIED", &west)),
    ])
    .await;
    let (send, mut seen) = channel::channel(Followed::default());
    let name = "n1".to_owned();
    let following = follow::run(server.api.clone(), name, send);
    let task = tokio_util::task::TaskTracker::new().spawn(following);
    let refused = seen.wait_for(|seen| seen.refused.is_some()).await;
    let reason = refused.unwrap().refused.clone().unwrap();
    assert!(
        reason.contains("the verb watch on nodes is missing"),
        "{reason}"
    );
    let none = Followed::default();
    let labelled = |seen: &Followed| seen.refused.is_none() && *seen != none;
    let first = seen.wait_for(labelled).await.unwrap().clone();
    // The watch that began again with the same labels is no change: the next one is of other labels.
    seen.wait_for(|seen| *seen != first).await.unwrap();
    assert_eq!(server.requests.lock().len(), 5);
    let wanted = "GET /api/v1/nodes?watch=true&fieldSelector=metadata.name%3Dn1&resourceVersion=0";
    assert!(
        server.requests.lock()[1..]
            .iter()
            .all(|one| one.starts_with(wanted))
    );
    task.abort();
}
