//! Documents of the directory and of the cluster together.

use serde_json::json;

use super::{super::cluster::Seen, *};
use crate::policy::parse::{parse_documents, parse_object};

const POLICY: &str = "CiliumNetworkPolicy";

fn value(name: &str, label: &str) -> serde_json::Value {
    json!({
        "apiVersion": "cilium.io/v2",
        "kind": POLICY,
        "metadata": {"name": name, "namespace": "shop"},
        "spec": {"endpointSelector": {"matchLabels": {"app": label}}, "egress": [{}]},
    })
}

/// A document of the directory.
fn own(name: &str) -> PolicyDocument {
    let text = value(name, "directory").to_string();
    parse_documents(&text, "file.yaml").remove(0).unwrap()
}

fn key(name: &str) -> String {
    format!("{POLICY}/shop/{name}")
}

fn watched(merged: &mut Merged, seen: Vec<Seen>) -> Vec<String> {
    short(merged.watched(vec![Batch { kind: POLICY, seen }]))
}

fn put(name: &str) -> Seen {
    let key = key(name);
    let document = parse_object(&value(name, "cluster"), &key);
    Seen::Put {
        key,
        digest: 1,
        document,
        is_marked: false,
        json: None,
    }
}

/// Changes in short: `init`, `a of file.yaml`, `-a`, `refused a`, `done`.
fn short(changes: Vec<PolicyChange>) -> Vec<String> {
    let name = |key: &str| key.rsplit('/').next().unwrap().to_owned();
    let changes = changes.into_iter().map(|change| match change {
        PolicyChange::Document(SourceEvent::Init) => "init".to_owned(),
        PolicyChange::Document(SourceEvent::InitDone) => "done".to_owned(),
        PolicyChange::Document(SourceEvent::Apply(document)) => {
            format!("{} of {}", name(&document.key), document.source)
        }
        PolicyChange::Document(SourceEvent::Delete(key)) => format!("-{}", name(&key)),
        PolicyChange::Rejected(errors) => {
            let names = errors.iter().map(|error| name(error.key.as_ref().unwrap()));
            format!("refused {}", names.collect::<Vec<_>>().join(","))
        }
        PolicyChange::Uncertain(uncertain) => format!("uncertain {uncertain}"),
    });
    changes.collect()
}

fn list_of(documents: Vec<PolicyDocument>) -> Vec<PolicyChange> {
    let all = documents.into_iter().map(SourceEvent::Apply);
    let all = [SourceEvent::Init]
        .into_iter()
        .chain(all)
        .chain([SourceEvent::InitDone]);
    all.map(PolicyChange::Document).collect()
}

fn change(event: SourceEvent<PolicyDocument>) -> Vec<PolicyChange> {
    vec![PolicyChange::Document(event)]
}

fn with_cluster() -> Merged {
    Merged::new(Some(ClusterDocuments::new([POLICY])))
}

#[test]
fn a_directory_alone_passes_unchanged() {
    let mut merged = Merged::new(None);
    let changes = merged.directory(list_of(vec![own("a")]));
    assert_eq!(short(changes), ["init", "a of file.yaml", "done"]);
}

#[test]
fn the_listing_begins_when_both_are_listed_in_either_order() {
    let complete = ["init", "b of cluster", "a of file.yaml", "done"];
    let mut merged = with_cluster();
    assert_eq!(short(merged.directory(list_of(vec![own("a")]))), [""; 0]);
    let listed = watched(&mut merged, vec![Seen::Listing, put("b"), Seen::Listed]);
    assert_eq!(listed, complete);
    let mut merged = with_cluster();
    assert_eq!(
        watched(&mut merged, vec![Seen::Listing, put("b"), Seen::Listed]),
        [""; 0]
    );
    assert_eq!(short(merged.directory(list_of(vec![own("a")]))), complete);
    let mut merged = with_cluster();
    merged.without_directory();
    assert_eq!(
        watched(&mut merged, vec![Seen::Listing, Seen::Listed]),
        ["init", "done"]
    );
}

#[test]
fn of_one_kind_and_name_from_both_the_clusters_counts_and_the_directorys_is_named() {
    let mut merged = with_cluster();
    merged.directory(list_of(vec![own("a")]));
    let listed = watched(&mut merged, vec![Seen::Listing, put("a"), Seen::Listed]);
    assert_eq!(listed, ["init", "a of cluster", "refused a", "done"]);
    // The directory's document changes: nothing follows.
    assert_eq!(
        short(merged.directory(change(SourceEvent::Apply(own("a"))))),
        [""; 0]
    );
    // The cluster's object is removed: the directory's document counts.
    assert_eq!(
        watched(&mut merged, vec![Seen::Gone(key("a"))]),
        ["a of file.yaml", "refused "]
    );
    // The cluster's object comes again.
    assert_eq!(
        watched(&mut merged, vec![put("a")]),
        ["a of cluster", "refused a"]
    );
    // The directory's document is removed: the cluster's object stays.
    assert_eq!(
        short(merged.directory(change(SourceEvent::Delete(key("a"))))),
        ["refused "]
    );
    assert_eq!(watched(&mut merged, vec![Seen::Gone(key("a"))]), ["-a"]);
}
