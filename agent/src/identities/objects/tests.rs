//! Against a server that gives scripted answers.

use agent_cluster::api::scripted::{Server, refusal};

use super::*;

const TAKEN: &str = "ciliumidentities.cilium.io \"300\" already exists";

fn set(app: &str) -> LabelSet {
    LabelSet::parse(&[&format!("k8s:app={app}")]).unwrap()
}

fn objects(server: &Server) -> Objects {
    Objects {
        api: server.api.clone(),
        node: "n1".to_owned(),
    }
}

fn object(app: &str) -> Value {
    json!({
        "apiVersion": "cilium.io/v2", "kind": "CiliumIdentity",
        "metadata": {
            "name": "300", "uid": "u", "resourceVersion": "7", "annotations": {MADE_BY: HOLDFAST},
        },
        "security-labels": {"k8s:app": app},
    })
}

fn found(object: &Value) -> (u16, String) {
    (200, object.to_string())
}

/// The result of an attempt to make number 300 for web, and the requests after the client's check.
async fn made(answers: Vec<(u16, String)>) -> (Result<Made, Option<u16>>, Vec<String>) {
    let server = Server::start(answers).await;
    let made = objects(&server)
        .make(IdentityId(300), &set("web"), true)
        .await;
    let requests = server.requests.lock().split_off(1);
    (made.map_err(|error| error.code()), requests)
}

#[tokio::test]
async fn cluster_identities_are_made_or_read_and_never_changed() {
    let create = format!("POST {ALL}");
    let read = format!("GET {ALL}/300");
    let (result, requests) = made(vec![(201, object("web").to_string())]).await;
    assert_eq!(
        (result, requests),
        (Ok(Made::Created), vec![create.clone()])
    );
    // A webhook changes the labels.
    let (result, requests) = made(vec![(201, object("db").to_string())]).await;
    assert_eq!((result, requests.len()), (Err(Some(422)), 1));
    for (theirs, wanted) in [("web", Made::Found), ("db", Made::Others)] {
        let (result, requests) = made(vec![refusal(409, TAKEN), found(&object(theirs))]).await;
        assert_eq!(result, Ok(wanted), "{theirs}");
        assert_eq!(requests, [create.clone(), read.clone()]);
    }
    // It was deleted in between.
    let answers = vec![
        refusal(409, TAKEN),
        refusal(404, "gone"),
        (201, "{}".to_owned()),
    ];
    let (result, requests) = made(answers).await;
    assert_eq!((result, requests.len()), (Ok(Made::Created), 3));
    // An object that cannot be read has other labels.
    let (result, _) = made(vec![
        refusal(409, TAKEN),
        found(&json!({"metadata": {"name": "300"}})),
    ])
    .await;
    assert_eq!(result, Ok(Made::Others));
    for code in [403, 404, 500, 503] {
        let (result, requests) = made(vec![refusal(code, "no")]).await;
        assert_eq!((result, requests.len()), (Err(Some(code)), 1));
    }
}

#[tokio::test]
async fn labels_that_no_object_can_say_make_no_request() {
    let server = Server::start(Vec::new()).await;
    let twice = LabelSet::parse(&["k8s:app=web", "k8s:app=db"]).unwrap();
    let made = objects(&server).make(IdentityId(300), &twice, true).await;
    assert_eq!(made.unwrap(), Made::Others);
    assert_eq!(server.requests.lock().len(), 1);
}

#[tokio::test]
async fn an_object_that_only_a_node_knows_names_it() {
    let server = Server::start(Vec::new()).await;
    let objects = objects(&server);
    let of =
        |is_of_pod| objects.object(IdentityId(300), &set("web"), is_of_pod)["metadata"].clone();
    assert_eq!(
        of(true),
        json!({
            "name": "300", "labels": {MANAGED_BY: HOLDFAST}, "annotations": {MADE_BY: HOLDFAST},
        })
    );
    let of_node = json!({NODE: "n1", MADE_BY: HOLDFAST});
    assert_eq!(of(false)["annotations"], of_node);
}

/// The result of an attempt to delete number 300 of web with the uid u, and the number of requests.
async fn deleted(answers: Vec<(u16, String)>) -> (Deleted, usize) {
    let server = Server::start(answers).await;
    let uid = Some(Arc::from("u"));
    let deleted = objects(&server)
        .delete(IdentityId(300), &set("web"), uid.as_ref())
        .await;
    let requests = server.requests.lock().len() - 1;
    (deleted.unwrap(), requests)
}

#[tokio::test]
async fn only_an_object_of_agents_that_is_as_it_was_is_deleted() {
    let done = (200, "{}".to_owned());
    assert_eq!(
        deleted(vec![found(&object("web")), done.clone()]).await,
        (Deleted::Done, 2)
    );
    let mut other_uid = object("web");
    other_uid["metadata"]["uid"] = json!("v");
    let mut of_others = object("web");
    of_others["metadata"]["annotations"] = json!({});
    // An object of Cilium, which copied our label from a pod.
    of_others["metadata"]["labels"] = json!({MANAGED_BY: HOLDFAST});
    for (what, object) in [
        ("labels", &object("db")),
        ("uid", &other_uid),
        ("writer", &of_others),
    ] {
        assert_eq!(
            deleted(vec![found(object)]).await,
            (Deleted::Kept, 1),
            "{what}"
        );
    }
    assert_eq!(
        deleted(vec![refusal(404, "gone")]).await,
        (Deleted::Kept, 1)
    );
    // It changed since it was read.
    let changed = vec![found(&object("web")), refusal(409, "Precondition failed")];
    assert_eq!(deleted(changed).await, (Deleted::Kept, 2));
    // First an existing node uses it, and then a node that does not exist.
    let mut of_node = object("web");
    of_node["metadata"]["annotations"][NODE] = json!("n2");
    let there = vec![found(&of_node), done.clone()];
    assert_eq!(deleted(there).await, (Deleted::Kept, 2));
    let gone = vec![found(&of_node), refusal(404, "gone"), done.clone()];
    assert_eq!(deleted(gone).await, (Deleted::Done, 3));
    // A text that cannot be a node's name causes no request.
    of_node["metadata"]["annotations"][NODE] = json!("../nodes/n2");
    assert_eq!(
        deleted(vec![found(&of_node), done]).await,
        (Deleted::Done, 2)
    );
}
