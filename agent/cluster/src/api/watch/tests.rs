//! Against a server that gives scripted answers.

use agent_core::policy::parse::parse_object;
use serde_json::json;

use super::*;
use crate::{
    api::scripted::{HELD, Server, refusal},
    resource::WITH_IDENTITIES,
};

/// Starts the watch of one kind against the scripted server.
fn watch_of(server: &Server, kind: &str) -> Started {
    watch_of_scope(server, kind, PodScope::All)
}

fn watch_of_scope(server: &Server, kind: &str, pods: PodScope) -> Started {
    let resource = WITH_IDENTITIES.iter().find(|one| one.kind == kind).unwrap();
    let health = ClusterHealth::new("server", WITH_IDENTITIES);
    let (send, batches) = mpsc::channel(64);
    let watch = Watch {
        api: server.api.clone(),
        resource,
        health: health.clone(),
        send,
        read: parse_object,
        has_service_blocks: false,
        pods,
        hash: RandomState::new(),
    };
    let stop = CancellationToken::new();
    tokio_util::task::TaskTracker::new().spawn(watch.run(stop.clone()));
    Started {
        kind: resource.kind,
        batches,
        health,
        _stop: stop.drop_guard(),
    }
}

struct Started {
    kind: &'static str,
    batches: mpsc::Receiver<Batch>,
    health: ClusterHealth,
    _stop: tokio_util::sync::DropGuard,
}

impl Started {
    /// What the watch sees next, in short.
    async fn next(&mut self) -> Vec<String> {
        let batch = tokio::time::timeout(Duration::from_secs(60), self.batches.recv()).await;
        let batch = batch.expect("the watch sees something").unwrap();
        assert_eq!(batch.kind, self.kind);
        let seen = batch.seen.into_iter().map(|seen| match seen {
            Seen::Listing => "listing".to_owned(),
            Seen::Listed => "listed".to_owned(),
            Seen::Gone(key) => format!("-{key}"),
            Seen::Put { key, document, .. } => match document {
                Ok(document) => {
                    assert_eq!(document.key, key);
                    key
                }
                Err(error) => format!("refused {error}"),
            },
        });
        seen.collect()
    }

    async fn until_stale(&self, what: &str) {
        let kind = self.kind;
        let reason = async || {
            let mut watches = self.health.watches().into_iter();
            watches.find(|watch| watch.kind == kind).unwrap().reason
        };
        polling::until_awaited(what, reason, |reason| {
            reason.as_ref().is_some_and(|reason| reason.contains(what))
        })
        .await;
    }
}

fn namespace(name: &str, version: u32) -> Value {
    json!({"metadata": {"name": name, "resourceVersion": version.to_string()}})
}

fn list(version: &str, next: &str, items: &[Value]) -> (u16, String) {
    let metadata = json!({"resourceVersion": version, "continue": next});
    (
        200,
        json!({"metadata": metadata, "items": items}).to_string(),
    )
}

fn lines(lines: &[(&str, Value)]) -> (u16, String) {
    let lines = lines
        .iter()
        .map(|(kind, object)| json!({"type": kind, "object": object}));
    (200, lines.map(|line| format!("{line}\n")).collect())
}

#[tokio::test]
async fn pages_are_one_list_and_the_watch_goes_on_from_its_version() {
    let server = Server::start(vec![
        list("5", "more", &[namespace("a", 1)]),
        list("5", "", &[namespace("b", 2)]),
        lines(&[
            ("ADDED", namespace("c", 6)),
            ("BOOKMARK", json!({"metadata": {"resourceVersion": "8"}})),
            ("DELETED", namespace("a", 9)),
        ]),
        lines(&[("MODIFIED", namespace("b", 11))]),
    ])
    .await;
    let mut watch = watch_of(&server, "Namespace");
    assert_eq!(watch.next().await, ["listing", "Namespace/a"]);
    assert_eq!(watch.next().await, ["Namespace/b", "listed"]);
    assert_eq!(watch.next().await, ["Namespace/c"]);
    assert_eq!(watch.next().await, ["-Namespace/a"]);
    assert_eq!(watch.next().await, ["Namespace/b"]);
    let requests = server.requests.lock().clone();
    assert_eq!(requests[0], "GET /version", "the client's own check");
    let wanted = [
        "limit=500",
        "continue=more",
        "resourceVersion=5",
        "resourceVersion=9",
    ];
    for (request, wanted) in requests.iter().skip(1).zip(wanted) {
        assert!(
            request.starts_with("GET /api/v1/namespaces?") && request.contains(wanted),
            "{request}"
        );
    }
    assert!(
        requests[3].contains("allowWatchBookmarks=true"),
        "{requests:?}"
    );
}

#[tokio::test]
async fn a_version_that_is_too_old_leads_to_a_new_list() {
    let too_old =
        json!({"kind": "Status", "code": 410, "message": "too old resource version: 2 (346)"});
    let server = Server::start(vec![
        list("2", "", &[namespace("a", 1)]),
        lines(&[("ERROR", too_old)]),
        list("346", "", &[namespace("b", 3)]),
    ])
    .await;
    let mut watch = watch_of(&server, "Namespace");
    assert_eq!(watch.next().await, ["listing", "Namespace/a", "listed"]);
    assert_eq!(watch.next().await, ["listing", "Namespace/b", "listed"]);
}

#[tokio::test]
async fn a_list_that_breaks_off_begins_again() {
    let server = Server::start(vec![
        list("2", "more", &[namespace("a", 1)]),
        refusal(410, "the continue token is too old"),
        refusal(429, "storage is (re)initializing"),
        list("3", "", &[namespace("b", 3)]),
    ])
    .await;
    let mut watch = watch_of(&server, "Namespace");
    assert_eq!(watch.next().await, ["listing", "Namespace/a"]);
    assert_eq!(watch.next().await, ["listing", "Namespace/b", "listed"]);
}

#[tokio::test]
async fn a_refusal_names_the_verb_and_the_remedy() {
    let server = Server::start(vec![refusal(403, "namespaces is forbidden")]).await;
    let watch = watch_of(&server, "Namespace");
    watch
        .until_stale("the verb list on namespaces is missing")
        .await;
    let server = Server::start(vec![
        list("2", "", &[]),
        refusal(403, "ciliumnodes is forbidden"),
    ])
    .await;
    let watch = watch_of(&server, "CiliumNode");
    watch
        .until_stale("the verb watch on ciliumnodes.cilium.io is missing")
        .await;
    let server = Server::start(vec![refusal(401, "Unauthorized")]).await;
    let watch = watch_of(&server, "Namespace");
    watch.until_stale("does not accept the token").await;
}

#[tokio::test]
async fn identities_that_cannot_be_read_name_the_chart_value_or_the_role() {
    let server = Server::start(vec![refusal(404, "404 page not found")]).await;
    let watch = watch_of(&server, "CiliumIdentity");
    watch
        .until_stale(
            "ciliumidentities.cilium.io: install the CRDs (chart values identities.mode=cluster and \
             crds.install)",
        )
        .await;
    let server = Server::start(vec![refusal(403, "ciliumidentities is forbidden")]).await;
    let watch = watch_of(&server, "CiliumIdentity");
    watch
        .until_stale(
            "the verb list on ciliumidentities.cilium.io is missing; add it to the ClusterRole \
             holdfast-identities-reader",
        )
        .await;
}

#[tokio::test]
async fn a_number_outside_of_the_range_is_refused_by_name_and_the_others_count() {
    let identity = |name: &str| {
        json!({
            "metadata": {"name": name, "creationTimestamp": "2026-11-23T12:00:00Z"},
            "security-labels": {"k8s:app": "web"},
        })
    };
    let answer = list(
        "5",
        "",
        &[identity("255"), identity("256"), identity("61440")],
    );
    let server = Server::start(vec![answer]).await;
    let mut watch = watch_of(&server, "CiliumIdentity");
    let seen = watch.next().await;
    for (at, number) in [(1, "255"), (3, "61440")] {
        let refused = format!("refused cluster (CiliumIdentity/{number}): metadata.name");
        assert!(seen[at].starts_with(&refused), "{seen:?}");
    }
    assert_eq!(seen[2], "CiliumIdentity/256");
}

#[tokio::test]
async fn an_odd_object_is_refused_by_name_and_the_watch_goes_on() {
    let odd =
        json!({"metadata": {"name": "odd", "namespace": "n", "resourceVersion": "4"}, "spec": 7});
    let good = json!({"metadata": {"name": "c", "namespace": "n", "resourceVersion": "6"}});
    let server = Server::start(vec![
        list("5", "", &[odd, Value::Null]),
        lines(&[("ADDED", good)]),
    ])
    .await;
    let mut watch = watch_of(&server, "Pod");
    let seen = watch.next().await;
    assert!(
        seen[1].starts_with("refused cluster (Pod/n/odd): spec"),
        "{seen:?}"
    );
    assert!(seen[2].contains("Pod/?"), "{seen:?}");
    assert_eq!(watch.next().await, ["Pod/n/c"]);
}

#[tokio::test]
async fn a_quiet_watch_is_fresh_again_once_the_server_answers() {
    let server = Server::start(vec![list("5", "", &[])]).await;
    let mut watch = watch_of(&server, "Namespace");
    assert_eq!(watch.next().await, ["listing", "listed"]);
    watch.until_stale("503").await;
    let bookmark = json!({"metadata": {"resourceVersion": "8"}});
    server
        .answers
        .lock()
        .push_back(lines(&[("BOOKMARK", bookmark)]));
    let fresh = || watch.health.watches()[0].reason.is_none();
    polling::until_async("the watch is fresh", fresh, |fresh| *fresh).await;
}

/// As [`lines`], of a watch that does not end.
fn held(of: &[(&str, Value)]) -> (u16, String) {
    let (code, text) = lines(of);
    (code + HELD, text)
}

fn pod(name: &str, version: u32) -> Value {
    json!({"metadata": {"name": name, "namespace": "n", "resourceVersion": version.to_string()}})
}

#[tokio::test]
async fn pods_of_a_scope_are_one_list_of_several_requests() {
    let scope = PodScope::Kept {
        node: "n1".to_owned(),
        keep: vec!["k8s-app=kube-dns".parse().unwrap()],
    };
    let server = Server::start(vec![
        list("5", "", &[pod("own", 1), pod("moved", 4)]),
        list("6", "", &[pod("dns", 2), pod("moved", 4)]),
        held(&[("DELETED", pod("moved", 7)), ("MODIFIED", pod("own", 8))]),
        held(&[("DELETED", pod("moved", 9)), ("ADDED", pod("dns2", 10))]),
    ])
    .await;
    let mut watch = watch_of_scope(&server, "Pod", scope);
    assert_eq!(watch.next().await, ["listing", "Pod/n/own", "Pod/n/moved"]);
    // Objects of the first part stay, although the second part lists.
    assert_eq!(watch.next().await, ["Pod/n/dns", "Pod/n/moved", "listed"]);
    let mut seen = Vec::new();
    for _ in 0..3 {
        seen.extend(watch.next().await);
    }
    seen.sort();
    // The pod that left both parts is gone once.
    assert_eq!(seen, ["-Pod/n/moved", "Pod/n/dns2", "Pod/n/own"]);
    let requests = server.requests.lock().clone();
    for (request, wanted) in requests.iter().skip(1).zip([
        ["fieldSelector=spec.nodeName%3Dn1", "limit=500"],
        [
            "fieldSelector=spec.nodeName%21%3Dn1",
            "labelSelector=k8s-app%3Dkube-dns",
        ],
        ["fieldSelector=spec.nodeName%3Dn1", "resourceVersion=5"],
        ["fieldSelector=spec.nodeName%21%3Dn1", "resourceVersion=6"],
    ]) {
        for wanted in wanted {
            assert!(request.contains(wanted), "{request} lacks {wanted}");
        }
    }
}

#[tokio::test]
async fn a_part_that_cannot_be_read_again_makes_the_kind_stale_and_all_parts_list_again() {
    let scope = PodScope::Kept {
        node: "n1".to_owned(),
        keep: vec!["k8s-app=kube-dns".parse().unwrap()],
    };
    let server = Server::start(vec![
        list("5", "", &[pod("own", 1)]),
        list("6", "", &[pod("dns", 2)]),
        lines(&[]),
        refusal(410, "too old"),
        list("15", "", &[pod("own", 1)]),
        list("16", "", &[]),
    ])
    .await;
    let mut watch = watch_of_scope(&server, "Pod", scope);
    assert_eq!(watch.next().await, ["listing", "Pod/n/own"]);
    assert_eq!(watch.next().await, ["Pod/n/dns", "listed"]);
    assert_eq!(watch.next().await, ["listing", "Pod/n/own"]);
    assert_eq!(watch.next().await, ["listed"]);
}

#[test]
fn a_part_that_lags_behind_brings_no_earlier_state_back() {
    let mut parts = Parts::new(vec![Part::default(), Part::default()]);
    let mut take = |at: usize, version: u32| {
        let objects = vec![pod("dns", version)];
        !parts
            .latest(at, objects, |_| "Pod/n/dns".to_owned())
            .is_empty()
    };
    // The pod was made without a node, and then bound to this one, whose part is read first.
    assert!(take(0, 10) && take(0, 15));
    assert!(!take(1, 8) && !take(1, 9));
    assert!(take(1, 15) && take(0, 16));
    assert!(!parts.leave(1, "Pod/n/dns") && parts.leave(0, "Pod/n/dns"));
    // Another pod of this name.
    assert!(
        !parts
            .latest(1, vec![pod("dns", 3)], |_| "Pod/n/dns".to_owned())
            .is_empty()
    );
}
