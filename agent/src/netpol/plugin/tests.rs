//! Requests of the plugin, without a kernel.

use std::net::IpAddr;

use agent_core::policy::parse::parse_documents;

use super::*;
use crate::endpoint::discover::by_route::Way;

fn put(shared: &Shared, documents: &str) {
    let mut state = shared.state.lock();
    for document in parse_documents(documents, "test") {
        state.put(document.unwrap());
    }
}

fn attachment(container: &str, pod: &str, addresses: &[&str]) -> Attachment {
    let addresses = addresses.iter().map(|text| text.parse().unwrap());
    Attachment {
        id: AttachmentId::new(container, "eth0").unwrap(),
        netns: "/run/netns/none".into(),
        pod: pod.to_owned(),
        uid: Some("u".to_owned()),
        addresses: addresses.collect(),
    }
}

fn open(state_dir: &Path) -> (Arc<Shared>, PluginPods) {
    let shared = Arc::new(Shared::new("n1"));
    let mut damaged = Vec::new();
    let file = AttachedFile::in_dir(state_dir);
    let pods = PluginPods::open(Arc::clone(&shared), file, &mut damaged).unwrap();
    assert!(damaged.is_empty(), "{damaged:?}");
    (shared, pods)
}

const POD: &str = "{apiVersion: v1, kind: Pod, metadata: {name: web, namespace: shop, uid: u, labels: {app: web}},
    spec: {nodeName: n1, containers: [{ports: [{name: dns, containerPort: 53, protocol: UDP}]}]}}";

/// Addresses of the pods of this node.
fn addresses(shared: &Shared) -> Vec<IpAddr> {
    let mut state = shared.state.lock();
    state.commit().unwrap();
    let pods = state.pipeline.pods().values();
    pods.flat_map(|pod| pod.addresses.clone()).collect()
}

#[test]
fn a_pod_is_taken_once_its_document_is_known_and_is_in_force_once_the_kernel_has_all_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let (shared, pods) = open(dir.path());
    let wanted = attachment("a", "shop/web", &["10.0.0.7"]);
    let refused = || pods.attach(wanted.clone()).unwrap_err();
    assert!(matches!(refused(), AttachError::Starting));
    shared.state.lock().set_listed();
    let error = refused();
    assert!(
        error.is_awaited() && error.to_string().contains("shop/web"),
        "{error}"
    );
    put(&shared, POD);
    let without = attachment("a", "shop/web", &[]);
    let error = pods.attach(without).unwrap_err();
    assert!(
        !error.is_awaited() && error.to_string().contains("eth0"),
        "{error}"
    );
    pods.attach(wanted).unwrap();
    let key = "cni/a/eth0";
    let standing = || shared.state.lock().standing(key);
    assert_eq!(standing(), PodStanding::Incomplete(None));
    assert_eq!(addresses(&shared), ["10.0.0.7".parse::<IpAddr>().unwrap()]);
    assert!(matches!(standing(), PodStanding::Incomplete(Some(why)) if why.contains("route")));
    // Does what the enforcer does after a batch.
    let accept = |shared: &Shared| {
        let mut state = shared.state.lock();
        state.force.accepted = state.generation;
    };
    accept(&shared);
    let lead = |way| {
        let mut state = shared.state.lock();
        let mut ways = state.ways.clone();
        ways.note("10.0.0.7".parse().unwrap(), way);
        state.set_ways(ways);
    };
    let (name, kind) = ("eth0".to_owned(), "macvlan".to_owned());
    lead(Way::Elsewhere { name, kind });
    assert!(matches!(standing(), PodStanding::Incomplete(Some(why)) if why.contains("macvlan")));
    let name = "veth7".to_owned();
    lead(Way::Pair { index: 7, name });
    assert_eq!(standing(), PodStanding::Incomplete(None));
    accept(&shared);
    assert_eq!(standing(), PodStanding::InForce(None));
    // After a later change of another object, the pod is still in force.
    put(
        &shared,
        "{apiVersion: v1, kind: Namespace, metadata: {name: shop}}",
    );
    assert_eq!(standing(), PodStanding::InForce(None));
    shared
        .state
        .lock()
        .surroundings
        .problems
        .push("kube-proxy".to_owned());
    assert_eq!(standing(), PodStanding::Waiting("kube-proxy".to_owned()));
    assert_eq!(
        shared.state.lock().standing("cni/b/eth0"),
        PodStanding::Absent
    );
    assert_eq!(
        pods.detach(&AttachmentId::new("a", "eth0").unwrap())
            .unwrap(),
        1
    );
    assert_eq!(standing(), PodStanding::Absent);
    assert!(addresses(&shared).is_empty());
    assert_eq!(shared.state.lock().freed.len(), 1);
}

#[test]
fn a_restart_knows_the_pods_of_the_plugin_before_any_document_until_their_namespaces_are_gone() {
    let dir = tempfile::tempdir().unwrap();
    let netns = dir.path().join("netns");
    fs::write(&netns, "").unwrap();
    {
        let (shared, pods) = open(dir.path());
        shared.state.lock().set_listed();
        put(&shared, POD);
        let seen = Attachment {
            netns: netns.clone(),
            ..attachment("a", "shop/web", &["10.0.0.7", "fd00::7"])
        };
        pods.attach(seen).unwrap();
    }
    let (shared, pods) = open(dir.path());
    assert_eq!(addresses(&shared).len(), 2);
    let pod = Arc::clone(&shared.state.lock().attached.pods().next().unwrap().pod);
    assert_eq!((pod.labels["app"].as_str(), pod.ports.len()), ("web", 1));
    assert_eq!(pods.remove_ended().unwrap(), 0);
    fs::remove_file(&netns).unwrap();
    assert_eq!(pods.remove_ended().unwrap(), 1);
    assert!(addresses(&open(dir.path()).0).is_empty());
    // A namespace may exist if its directory is not seen.
    assert!(!is_gone(Path::new("/nowhere/run/netns/none")));
}

#[test]
fn a_list_that_cannot_be_written_lets_no_pod_start() {
    let dir = tempfile::tempdir().unwrap();
    let (shared, pods) = open(&dir.path().join("missing"));
    shared.state.lock().set_listed();
    put(&shared, POD);
    let error = pods
        .attach(attachment("a", "shop/web", &["10.0.0.7"]))
        .unwrap_err();
    assert!(
        matches!(error, AttachError::Endpoint(EndpointError::File(_))),
        "{error}"
    );
    assert!(addresses(&shared).is_empty());
}

#[test]
fn a_damaged_list_is_set_aside_and_named() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("cni_pods.json"), "{").unwrap();
    let mut damaged = Vec::new();
    let shared = Arc::new(Shared::new("n1"));
    let file = AttachedFile::in_dir(dir.path());
    PluginPods::open(shared, file, &mut damaged).unwrap();
    let [text] = damaged.as_slice() else {
        panic!("{damaged:?}")
    };
    assert!(
        text.contains("cni_pods.json.corrupt") && text.contains("open"),
        "{text}"
    );
}
