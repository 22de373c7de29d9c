//! The CiliumNode of this node, against a server that gives scripted answers.

use super::*;
use crate::api::scripted::{Server, refusal};

fn node() -> Value {
    json!({
        "metadata": {"name": "n1", "uid": "u"},
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
    let turned_on = merged(&found, &with).unwrap();
    let expected = json!({"other": "stays", HIGH_SCALE: "full"});
    assert_eq!(turned_on["metadata"]["annotations"], expected);
    assert_eq!(merged(&turned_on, &with), None);
    let turned_off = merged(&turned_on, &without).unwrap();
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
    assert_eq!(merged(&found, &wanted_now), None);
    let later = wanted("n1", &node(), &addresses(&["192.0.2.1", "192.0.2.2"]));
    let merged_now = merged(&found, &later).unwrap();
    assert_eq!(merged_now["spec"]["addresses"], later["spec"]["addresses"]);
    assert_eq!(merged_now["spec"]["health"], found["spec"]["health"]);
    assert_eq!(merged_now["metadata"]["resourceVersion"], "7");
}

#[test]
fn one_that_another_program_made_is_left_alone() {
    let wanted = wanted("n1", &node(), &addresses(&["192.0.2.1"]));
    let found = json!({"metadata": {"name": "n1"}, "spec": {"addresses": []}});
    assert_eq!(merged(&found, &wanted), None);
}

#[tokio::test]
async fn it_is_created_once_and_then_only_looked_at() {
    let own = addresses(&["192.0.2.1"]);
    let as_it_is = (200, wanted("n1", &node(), &own).to_string());
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
        assert_eq!(write(&own_node(&server), &own).await, Ok(true));
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
