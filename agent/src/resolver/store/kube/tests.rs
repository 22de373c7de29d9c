//! Against a server that gives scripted answers.

use agent_cluster::api::scripted::{Server, refusal};
use tokio::sync::watch::Receiver;

use super::*;

const PATH: &str = "/apis/network.openshift.io/v1alpha1/namespaces/dns/dnsnameresolvers";
const LEASE_PATH: &str = "/apis/coordination.k8s.io/v1/namespaces/dns/leases/holdfast-resolver";

fn store(server: &Server, access: Access) -> KubeStore {
    let settings = KubeSettings {
        namespace: "dns".to_owned(),
        node: "n1".to_owned(),
        lease: Duration::from_secs(3),
        access,
    };
    KubeStore::new(server.api.clone(), Arc::new(Feed::new("dns")), settings)
}

fn key() -> ObjectKey {
    ObjectKey {
        namespace: "dns".to_owned(),
        name: "dns-1".to_owned(),
    }
}

fn object(version: &str) -> (u16, String) {
    let object = json!({
        "apiVersion": API_VERSION, "kind": KIND,
        "metadata": {"namespace": "dns", "name": "dns-1", "resourceVersion": version},
        "spec": {"name": "www.example.org."},
    });
    (200, object.to_string())
}

fn at(version: &str) -> Version {
    Version(version.to_owned())
}

/// Requests after the client's own check.
fn requests(server: &Server) -> Vec<String> {
    server.requests.lock().iter().skip(1).cloned().collect()
}

#[tokio::test]
async fn objects_are_read_made_written_and_removed() {
    let list = json!({"metadata": {"continue": "more"}, "items": [
        serde_json::from_str::<Value>(&object("1").1).unwrap(),
        {"metadata": {"name": "odd"}, "spec": {"name": "com."}},
    ]});
    let answers = vec![
        object("1"),
        refusal(404, "not found"),
        (200, list.to_string()),
        (200, json!({"metadata": {}, "items": null}).to_string()),
        object("2"),
        refusal(409, "exists"),
        object("3"),
        refusal(409, "modified"),
        refusal(404, "not found"),
        (200, "{}".to_owned()),
        refusal(404, "not found"),
    ];
    let server = Server::start(answers).await;
    let store = store(&server, Access::Write);
    let known = store.get(&key()).await.unwrap().unwrap();
    assert_eq!(known.version, at("1"));
    assert_eq!(known.name.as_str(), "www.example.org.");
    assert_eq!(store.get(&key()).await, Ok(None));
    assert_eq!(store.list().await.unwrap(), std::slice::from_ref(&known));
    let made = store.create(&key(), &known.name).await.unwrap();
    assert!(matches!(made, Created::Done(object) if object.version == at("2")));
    let made = store.create(&key(), &known.name).await;
    assert_eq!(made, Ok(Created::Exists));
    let status = Status::default();
    for expected in [Updated::Done(at("3")), Updated::Conflict, Updated::Gone] {
        let updated = store.update_status(&key(), &at("2"), &status).await;
        assert_eq!(updated, Ok(expected));
    }
    // A version that is not known is read first.
    let updated = store.update_status(&key(), &at(""), &status).await;
    assert_eq!(updated, Ok(Updated::Conflict));
    for _ in 0..2 {
        assert_eq!(store.delete(&key()).await, Ok(()));
    }
    let of = |method: &str, rest: &str| format!("{method} {PATH}{rest}");
    assert_eq!(
        requests(&server),
        [
            of("GET", "/dns-1"),
            of("GET", "/dns-1"),
            of("GET", "?limit=50"),
            of("GET", "?limit=50&continue=more"),
            of("POST", ""),
            of("POST", ""),
            of("PATCH", "/dns-1/status"),
            of("PATCH", "/dns-1/status"),
            of("PATCH", "/dns-1/status"),
            of("DELETE", "/dns-1"),
            of("DELETE", "/dns-1"),
        ]
    );
    assert_eq!(*store.problems.borrow(), BTreeMap::new());
}

#[tokio::test]
async fn a_busy_server_is_asked_again_and_a_missing_right_is_named() {
    let answers = vec![
        refusal(429, "storage is (re)initializing"),
        refusal(503, "unavailable"),
        object("2"),
        refusal(403, "forbidden"),
        refusal(404, "namespaces \"dns\" not found"),
    ];
    let server = Server::start(answers).await;
    let store = Arc::new(store(&server, Access::Write));
    let mut health = watch_of(&store);
    let (updated, status) = (Updated::Done(at("2")), Status::default());
    let written = store.update_status(&key(), &at("1"), &status).await;
    assert_eq!(written, Ok(updated));
    assert_eq!(requests(&server).len(), 3);
    let refused = store.update_status(&key(), &at("2"), &status).await;
    let Err(StoreError::Refused(reason)) = refused else {
        panic!("{refused:?}");
    };
    for word in [
        "403",
        "patch dnsnameresolvers/status",
        "namespace dns",
        "holdfast-resolver",
    ] {
        assert!(reason.contains(word), "{word}: {reason}");
    }
    let known = health.wait_for(|health| !health.problems.is_empty()).await;
    assert_eq!(known.unwrap().problems, [reason]);
    let refused = store
        .create(&key(), &Fqdn::normalise("www.example.org"))
        .await;
    let Err(StoreError::Refused(reason)) = refused else {
        panic!("{refused:?}");
    };
    assert!(reason.contains("create the namespace dns"), "{reason}");
}

#[tokio::test]
async fn one_that_only_consumes_writes_nothing_and_never_leads() {
    let server = Server::start(Vec::new()).await;
    let store = store(&server, Access::Consume);
    let name = Fqdn::normalise("www.example.org");
    assert!(store.create(&key(), &name).await.is_err());
    assert!(store.delete(&key()).await.is_err());
    let status = Status::default();
    assert!(
        store
            .update_status(&key(), &at("1"), &status)
            .await
            .is_err()
    );
    let (role, known) = watch::channel(Role::Follows);
    let stop = CancellationToken::new();
    stop.cancel();
    store.lead(role, stop).await;
    assert_eq!(*known.borrow(), Role::Follows);
    assert_eq!(requests(&server), Vec::<String>::new());
}

#[tokio::test]
async fn a_leader_that_cannot_renew_stops_leading_and_one_that_stops_gives_the_lease_back() {
    let of = |holder: &str, version: &str| {
        let spec = json!({"holderIdentity": holder, "leaseDurationSeconds": 3});
        let lease = json!({"metadata": {"resourceVersion": version}, "spec": spec});
        (200, lease.to_string())
    };
    // The Lease is taken; then the server refuses with 503.
    let server = Server::start(vec![refusal(404, "not found"), of("n1", "1")]).await;
    let store = Arc::new(store(&server, Access::Write));
    let (role, mut known) = watch::channel(Role::Follows);
    let stop = CancellationToken::new();
    let tasks = tokio_util::task::TaskTracker::new();
    let leading = (Arc::clone(&store), stop.clone());
    tasks.spawn(async move { leading.0.lead(role, leading.1).await });
    until(&mut known, Role::Leads).await;
    until(&mut known, Role::Follows).await;
    assert!(!store.problems.borrow().is_empty());
    // The Lease is this agent's again, and is given back.
    let answers = [of("n1", "1"), of("n1", "2"), of("n1", "2"), of("", "3")];
    server.answers.lock().extend(answers);
    until(&mut known, Role::Leads).await;
    stop.cancel();
    tasks.close();
    tasks.wait().await;
    assert_eq!(*known.borrow(), Role::Follows);
    let last = requests(&server).split_off(requests(&server).len() - 2);
    assert_eq!(
        last,
        [format!("GET {LEASE_PATH}"), format!("PUT {LEASE_PATH}")]
    );
}

#[tokio::test]
async fn a_lease_of_another_agent_is_left_to_it() {
    let spec = json!({"holderIdentity": "n2", "leaseDurationSeconds": 3});
    let lease = json!({"metadata": {"resourceVersion": "1"}, "spec": spec});
    let server = Server::start(vec![(200, lease.to_string())]).await;
    let store = Arc::new(store(&server, Access::Write));
    let (role, known) = watch::channel(Role::Follows);
    let stop = CancellationToken::new();
    let tasks = tokio_util::task::TaskTracker::new();
    let leading = (Arc::clone(&store), stop.clone());
    tasks.spawn(async move { leading.0.lead(role, leading.1).await });
    polling::until_awaited(
        "the Lease was read",
        async || requests(&server),
        |requests| !requests.is_empty(),
    )
    .await;
    stop.cancel();
    tasks.close();
    tasks.wait().await;
    assert_eq!(*known.borrow(), Role::Follows);
    let all = requests(&server);
    assert!(all.iter().all(|one| one.starts_with("GET ")), "{all:?}");
}

async fn until(known: &mut Receiver<Role>, wanted: Role) {
    let limit = Duration::from_secs(60);
    let came = tokio::time::timeout(limit, known.wait_for(|role| *role == wanted)).await;
    came.expect("the role changes").unwrap();
}

/// Health of a store that is watched.
fn watch_of(store: &Arc<KubeStore>) -> Receiver<StoreHealth> {
    let (changes, received) = mpsc::channel(1);
    let (send, health) = watch::channel(StoreHealth::default());
    let store = Arc::clone(store);
    tokio_util::task::TaskTracker::new().spawn(async move {
        let _received = received;
        store.watch(changes, send, CancellationToken::new()).await;
    });
    health
}
