//! Which pods' addresses count, and when.

use super::*;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// A pod's document with this creation time.
fn document(name: &str, node: Option<&str>, addresses: &[&str], created: u64) -> Arc<Pod> {
    Arc::new(Pod {
        id: PodId::new("shop", name),
        labels: BTreeMap::from([("app".to_owned(), name.to_owned())]),
        node: node.map(Arc::from),
        addresses: addresses.iter().map(|text| ip(text)).collect(),
        created: Some(created),
        ports: BTreeMap::new(),
    })
}

fn attachment(pod: &Arc<Pod>, uid: &str, addresses: &[&str]) -> AttachedPod {
    AttachedPod {
        key: format!("cni/{uid}/eth0"),
        netns: None,
        uid: Some(uid.into()),
        addresses: addresses.iter().map(|text| ip(text)).collect(),
        pod: Arc::clone(pod),
        since: None,
    }
}

/// Name and addresses of each pod that is put; a pod that is removed has none.
fn said(effects: &[Effect]) -> Vec<(String, Vec<String>)> {
    let said = effects.iter().map(|effect| match effect {
        Effect::Put(pod) => (
            pod.id.name.to_string(),
            pod.addresses.iter().map(ToString::to_string).collect(),
        ),
        Effect::Remove(id) => (id.name.to_string(), Vec::new()),
    });
    said.collect()
}

fn expect(effects: &[Effect], wanted: &[(&str, &[&str])]) {
    let wanted = wanted.iter().map(|(name, addresses)| {
        let addresses = addresses.iter().map(|text| (*text).to_owned());
        ((*name).to_owned(), addresses.collect::<Vec<_>>())
    });
    assert_eq!(said(effects), wanted.collect::<Vec<_>>());
}

#[test]
fn an_address_of_the_plugin_counts_before_and_after_the_document_has_it() {
    let mut attached = Attached::new("n1");
    let pending = document("web", None, &[], 1);
    expect(
        &attached.put(Arc::clone(&pending), Some("u".into())),
        &[("web", &[])],
    );
    let effects = attached.attach(attachment(&pending, "u", &["10.0.0.7"]), Vec::new());
    expect(&effects, &[("web", &["10.0.0.7"])]);
    // The pod runs here, whatever its document says so far.
    assert!(matches!(&effects[0], Effect::Put(pod) if pod.node.as_deref() == Some("n1")));
    let running = document("web", Some("n1"), &["10.0.0.7"], 1);
    expect(
        &attached.put(running, Some("u".into())),
        &[("web", &["10.0.0.7"])],
    );
    let (gone, effects) = attached.detach(|pod| pod.key == "cni/u/eth0");
    assert_eq!(gone.len(), 1);
    // The document's address counts until the document changes.
    expect(&effects, &[("web", &["10.0.0.7"])]);
}

#[test]
fn an_address_of_the_plugin_is_no_other_pods_although_a_late_document_says_so() {
    let mut attached = Attached::new("n1");
    // After a reboot: each document has the address that the other pod has now.
    let (a, b) = (
        document("a", Some("n1"), &["10.0.0.2"], 1),
        document("b", Some("n1"), &["10.0.0.1"], 2),
    );
    attached.put(Arc::clone(&a), Some("a".into()));
    attached.put(Arc::clone(&b), Some("b".into()));
    let effects = attached.attach(attachment(&a, "a", &["10.0.0.1"]), vec![Arc::clone(&b)]);
    expect(&effects, &[("a", &["10.0.0.1", "10.0.0.2"]), ("b", &[])]);
    let effects = attached.attach(attachment(&b, "b", &["10.0.0.2"]), vec![Arc::clone(&a)]);
    expect(&effects, &[("a", &["10.0.0.1"]), ("b", &["10.0.0.2"])]);
    // The address does not count for a younger pod of another node either, until pod `a` ends. Then the documents
    // decide again.
    let late = document("c", Some("n2"), &["10.0.0.1"], 9);
    expect(&attached.put(late, None), &[("c", &[])]);
    let (_, effects) = attached.detach(|pod| pod.key == "cni/a/eth0");
    expect(
        &effects,
        &[
            ("a", &[]),
            ("b", &["10.0.0.2", "10.0.0.1"]),
            ("c", &["10.0.0.1"]),
        ],
    );
}

#[test]
fn an_address_that_the_runtime_gives_away_is_the_new_pods() {
    let mut attached = Attached::new("n1");
    let (a, b) = (document("a", None, &[], 1), document("b", None, &[], 2));
    attached.put(Arc::clone(&a), None);
    attached.put(Arc::clone(&b), None);
    attached.attach(attachment(&a, "a", &["10.0.0.1"]), Vec::new());
    let effects = attached.attach(attachment(&b, "b", &["10.0.0.1"]), Vec::new());
    expect(&effects, &[("a", &[]), ("b", &["10.0.0.1"])]);
    assert_eq!(attached.pods().count(), 1);
    // A further sandbox of a pod takes the place of the one before.
    let again = attachment(&b, "b2", &["10.0.0.3"]);
    expect(&attached.attach(again, Vec::new()), &[("b", &["10.0.0.3"])]);
    let (gone, _) = attached.detach(|pod| pod.key == "cni/b/eth0");
    assert!(gone.is_empty());
}

#[test]
fn a_pod_of_the_plugin_outlives_its_document_and_ends_with_a_younger_one_of_its_name() {
    let mut attached = Attached::new("n1");
    let first = document("db", Some("n1"), &[], 5);
    attached.put(Arc::clone(&first), Some("one".into()));
    attached.attach(attachment(&first, "one", &["10.0.0.1"]), Vec::new());
    let id = first.id.clone();
    expect(&[attached.remove(&id)], &[("db", &["10.0.0.1"])]);
    // A list that was stored before the pod was made says nothing about it.
    let older = document("db", Some("n1"), &["10.0.0.9"], 4);
    expect(
        &attached.put(older, Some("zero".into())),
        &[("db", &["10.0.0.1"])],
    );
    let younger = document("db", Some("n2"), &["10.1.0.1"], 6);
    let effects = attached.put(younger, Some("two".into()));
    expect(&effects[effects.len() - 1..], &[("db", &["10.1.0.1"])]);
    assert_eq!(attached.pods().count(), 0);
}

#[test]
fn a_pod_without_a_document_of_its_own_is_awaited_by_name() {
    let mut attached = Attached::new("n1");
    let id = PodId::new("shop", "web");
    let uid: Arc<str> = "new".into();
    let why = |attached: &Attached, elsewhere| {
        let found = attached.document(&id, Some(&uid), elsewhere);
        found.unwrap_err().to_string()
    };
    let none = why(&attached, None);
    assert!(
        none.contains("no Pod document of shop/web has arrived"),
        "{none}"
    );
    let away = document("web", Some("n2"), &[], 1);
    let elsewhere = why(&attached, Some(&away));
    assert!(
        elsewhere.contains("n2") && elsewhere.contains("--node-name"),
        "{elsewhere}"
    );
    attached.put(document("web", Some("n1"), &[], 1), Some("old".into()));
    let other = why(&attached, None);
    assert!(other.contains("uid old, not new"), "{other}");
    attached.put(document("web", Some("n1"), &[], 2), Some("new".into()));
    attached.document(&id, Some(&uid), None).unwrap();
    attached.document(&id, None, None).unwrap();
}
