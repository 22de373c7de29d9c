//! Documents of the cluster: first lists, later lists and changes.

use serde_json::json;

use super::*;
use crate::policy::parse::parse_object;

const POLICY: &str = "CiliumNetworkPolicy";

/// A policy of the namespace shop, with a label that tells its versions apart.
fn policy(name: &str, label: &str) -> Seen {
    let value = json!({
        "apiVersion": "cilium.io/v2",
        "kind": POLICY,
        "metadata": {"name": name, "namespace": "shop"},
        "spec": {"endpointSelector": {"matchLabels": {"app": label}}, "egress": [{}]},
    });
    seen(name, &value)
}

/// The same with a field that no policy has.
fn bad(name: &str) -> Seen {
    let value = json!({
        "apiVersion": "cilium.io/v2",
        "kind": POLICY,
        "metadata": {"name": name, "namespace": "shop"},
        "spec": {"endpointSelector": {}, "bogus": 1},
    });
    seen(name, &value)
}

fn seen(name: &str, value: &serde_json::Value) -> Seen {
    let key = key(name);
    let document = parse_object(value, &key);
    let digest = u64::try_from(value.to_string().bytes().map(usize::from).sum::<usize>()).unwrap();
    Seen::Put {
        key,
        digest,
        document,
        is_marked: false,
        json: Some(value.to_string().into()),
    }
}

fn key(name: &str) -> String {
    format!("{POLICY}/shop/{name}")
}

fn batch(seen: Vec<Seen>) -> Batch {
    Batch { kind: POLICY, seen }
}

fn list(mut all: Vec<Seen>) -> Batch {
    all.insert(0, Seen::Listing);
    all.push(Seen::Listed);
    batch(all)
}

/// Events in short: `+key`, `-key`.
fn short(events: &[SourceEvent<PolicyDocument>]) -> Vec<String> {
    let events = events.iter().map(|event| match event {
        SourceEvent::Apply(document) => format!("+{}", document.key),
        SourceEvent::Delete(key) => format!("-{key}"),
        SourceEvent::Init | SourceEvent::InitDone => "?".to_owned(),
    });
    events.collect()
}

fn listed(all: Vec<Seen>) -> ClusterDocuments {
    let mut documents = ClusterDocuments::new([POLICY]);
    assert_eq!(documents.take(list(all)), []);
    assert!(documents.is_complete());
    documents.begin();
    documents
}

#[test]
fn nothing_comes_out_until_every_kind_has_been_listed() {
    let mut documents = ClusterDocuments::new([POLICY, "Pod"]);
    assert_eq!(
        documents.take(batch(vec![Seen::Listing, policy("a", "a")])),
        []
    );
    assert_eq!(
        documents.take(batch(vec![policy("b", "b"), Seen::Listed])),
        []
    );
    assert_eq!(documents.take(batch(vec![policy("c", "c")])), []);
    assert!(!documents.is_complete());
    let pods = Batch {
        kind: "Pod",
        seen: vec![Seen::Listing, Seen::Listed],
    };
    assert_eq!(documents.take(pods), []);
    assert!(documents.is_complete());
    // Changes before `begin` are part of the listing.
    assert_eq!(documents.take(batch(vec![Seen::Gone(key("a"))])), []);
    let first: Vec<String> = documents.begin().into_iter().map(|one| one.key).collect();
    assert_eq!(first, [key("b"), key("c")]);
    let later = documents.take(batch(vec![policy("b", "2")]));
    assert_eq!(short(&later), [format!("+{}", key("b"))]);
}

#[test]
fn a_list_that_is_read_again_gives_only_the_difference() {
    let mut documents = listed(vec![policy("a", "1"), policy("b", "1"), policy("c", "1")]);
    let again = list(vec![policy("a", "1"), policy("b", "2"), policy("d", "1")]);
    let events = documents.take(again);
    assert_eq!(
        short(&events),
        ["b", "d"]
            .map(|n| format!("+{}", key(n)))
            .into_iter()
            .chain([format!("-{}", key("c"))])
            .collect::<Vec<_>>()
    );
}

#[test]
fn a_list_that_breaks_off_removes_nothing() {
    let mut documents = listed(vec![policy("a", "1"), policy("b", "1")]);
    assert_eq!(
        documents.take(batch(vec![Seen::Listing, policy("b", "1")])),
        []
    );
    // The list begins again, and is then complete.
    let events = documents.take(list(vec![policy("a", "1")]));
    assert_eq!(short(&events), [format!("-{}", key("b"))]);
}

#[test]
fn a_refused_version_leaves_the_last_good_one_and_ends_with_its_object() {
    let mut documents = listed(vec![policy("a", "1")]);
    assert!(!documents.is_uncertain());
    assert_eq!(documents.take(batch(vec![bad("a")])), []);
    assert!(documents.contains(&key("a")));
    let refused: Vec<_> = documents.refused().map(ToString::to_string).collect();
    assert!(
        refused.len() == 1 && refused[0].contains("bogus"),
        "{refused:?}"
    );
    // The good version comes back as it was: nothing changes but the list of refused ones.
    assert!(documents.take_refusals_changed());
    assert_eq!(documents.take(batch(vec![policy("a", "1")])), []);
    assert!(documents.take_refusals_changed() && documents.refused().next().is_none());
    documents.take(batch(vec![bad("a")]));
    let events = documents.take(batch(vec![Seen::Gone(key("a"))]));
    assert_eq!(short(&events), [format!("-{}", key("a"))]);
    assert!(documents.refused().next().is_none());
}

#[test]
fn a_policy_refused_at_the_start_makes_the_listing_uncertain_until_it_is_good_or_gone() {
    let mut documents = listed(vec![bad("a"), bad("b")]);
    assert!(documents.is_uncertain());
    documents.take(batch(vec![policy("a", "1")]));
    assert!(documents.is_uncertain());
    documents.take(batch(vec![Seen::Gone(key("b"))]));
    assert!(!documents.is_uncertain());
    // A new document that is refused later restricted nothing before.
    documents.take(batch(vec![bad("c")]));
    assert!(!documents.is_uncertain());
}

#[test]
fn a_stored_list_stands_in_until_the_watch_has_listed_and_only_the_difference_comes_out_then() {
    let document = |label: &str| match policy("a", label) {
        Seen::Put { document, .. } => document,
        _ => panic!("not put"),
    };
    let mut documents = ClusterDocuments::new([POLICY, "Pod"]);
    documents.note_changed();
    // The list of the watch has begun: its version of `a` is younger.
    documents.take(batch(vec![Seen::Listing, policy("a", "new")]));
    let mut stored = vec![(key("a"), document("old"))];
    for seen in [policy("b", "b"), bad("odd")] {
        if let Seen::Put { key, document, .. } = seen {
            stored.push((key, document));
        }
    }
    let (stood_in, events) = documents.stand_in(stored);
    assert_eq!(
        (stood_in.as_slice(), events),
        (&["CiliumNetworkPolicy", "Pod"][..], vec![])
    );
    assert!(documents.is_complete() && !documents.is_current());
    assert!(documents.is_uncertain());
    let PolicyDocument { body, .. } = &documents.begin()[0];
    assert_eq!(*body, document("new").unwrap().body);
    assert_eq!(documents.begin().len(), 0);
    // The watch's list ends: documents that it does not have are gone, and those that it has are noted.
    let events = documents.take(batch(vec![bad("odd"), Seen::Listed]));
    assert_eq!(short(&events), [format!("-{}", key("b"))]);
    assert!(!documents.is_current());
    let pods = vec![Seen::Listing, Seen::Listed];
    documents.take(Batch {
        kind: "Pod",
        seen: pods,
    });
    assert!(documents.is_current());
    let changed = documents.take_changed().unwrap();
    let noted: Vec<_> = changed
        .iter()
        .map(|(key, json)| (key.clone(), json.is_some()))
        .collect();
    assert_eq!(
        noted,
        [(key("a"), true), (key("b"), false), (key("odd"), true)]
    );
    // A refused version of a good policy leaves the good one on disk.
    documents.take(batch(vec![bad("a")]));
    assert!(documents.take_changed().unwrap().is_empty());
    documents.take(batch(vec![Seen::Gone(key("a"))]));
    assert_eq!(documents.take_changed().unwrap()[&key("a")], None);
}

/// The namespace whose uid identifies the cluster.
fn kube_system(uid: &str) -> (String, serde_json::Value) {
    let value = json!({
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": "kube-system", "uid": uid},
    });
    ("Namespace/kube-system".to_owned(), value)
}

#[test]
fn a_stored_list_of_another_cluster_is_noticed_when_the_watch_sees_the_uid() {
    let mut documents = ClusterDocuments::new([POLICY, "Namespace"]);
    let (key, value) = kube_system("green");
    let stored = vec![(key.clone(), parse_object(&value, &key))];
    documents.stand_in(stored);
    assert_eq!((documents.uid(), documents.foreign_list()), (None, None));
    for (uid, foreign) in [("green", None), ("blue", Some("green"))] {
        let (key, value) = kube_system(uid);
        let put = Seen::Put {
            document: parse_object(&value, &key),
            key,
            digest: 1,
            is_marked: false,
            json: Some(value.to_string().into()),
        };
        documents.take(Batch {
            kind: "Namespace",
            seen: vec![Seen::Listing, put, Seen::Listed],
        });
        assert_eq!(documents.uid().map(|uid| &**uid), Some(uid));
        assert_eq!(documents.foreign_list().map(|uid| &**uid), foreign);
    }
    // The lists of this cluster replace it.
    documents.take(list(vec![]));
    assert_eq!(documents.foreign_list(), None);
}
