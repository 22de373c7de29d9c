//! The policy directory with good and bad documents.

use std::{fs, path::Path};

use agent_core::{policy::source::PolicyChange, source_event::SourceEvent};
use holdfast_agent::policy_dir::{PolicyDir, last_good::LastGood};

const GOOD: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumClusterwideNetworkPolicy
metadata: {name: NAME}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toCIDR: [192.0.2.0/24]
"#;

fn good(name: &str) -> String {
    GOOD.replace("NAME", name)
}

fn write(dir: &Path, name: &str, text: &str) {
    fs::write(dir.join(name), text).unwrap();
}

/// Each event as a short text.
fn words(events: &[PolicyChange]) -> Vec<String> {
    events
        .iter()
        .map(|event| match event {
            PolicyChange::Document(SourceEvent::Init) => "init".to_owned(),
            PolicyChange::Document(SourceEvent::InitDone) => "done".to_owned(),
            PolicyChange::Document(SourceEvent::Apply(document)) => {
                format!("apply {}", name(&document.key))
            }
            PolicyChange::Document(SourceEvent::Delete(key)) => format!("delete {}", name(key)),
            PolicyChange::Rejected(errors) => format!("rejected {}", errors.len()),
            PolicyChange::Uncertain(true) => "uncertain".to_owned(),
            PolicyChange::Uncertain(false) => "certain".to_owned(),
        })
        .collect()
}

fn name(key: &str) -> &str {
    key.rsplit('/').next().unwrap()
}

#[test]
fn a_bad_document_keeps_its_last_good_version() {
    let dir = tempfile::tempdir().unwrap();
    write(
        dir.path(),
        "one.yaml",
        &format!("{}---{}", good("a"), good("b")),
    );
    let mut source = PolicyDir::new(dir.path());
    assert_eq!(
        words(&source.list()),
        ["init", "apply a", "apply b", "done"]
    );
    assert!(source.refresh().is_empty());

    // A field that does not exist, in one of two documents.
    let broken = good("a").replace("toCIDR", "toCIDRR");
    write(dir.path(), "one.yaml", &format!("{broken}---{}", good("b")));
    assert_eq!(words(&source.refresh()), ["rejected 1"]);

    // Text that is not YAML: no document of the file is removed.
    write(dir.path(), "one.yaml", "{{{");
    assert_eq!(words(&source.refresh()), ["rejected 1"]);

    // Repaired: the removed document and the error disappear.
    write(
        dir.path(),
        "one.yaml",
        &good("a").replace("192.0.2.0", "198.51.100.0"),
    );
    assert_eq!(
        words(&source.refresh()),
        ["delete b", "apply a", "rejected 0"]
    );

    fs::remove_file(dir.path().join("one.yaml")).unwrap();
    assert_eq!(words(&source.refresh()), ["delete a"]);
}

#[test]
fn two_files_with_the_same_document_are_distinguished() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "a.yaml", &good("x"));
    write(dir.path(), "b.yaml", &good("x"));
    write(dir.path(), ".hidden.yaml", &good("y"));
    write(dir.path(), "notes.txt", "no policy");
    let mut source = PolicyDir::new(dir.path());
    let events = source.list();
    assert_eq!(words(&events), ["init", "apply x", "rejected 1", "done"]);
    let Some(PolicyChange::Rejected(errors)) = events.get(2) else {
        panic!("{events:?}");
    };
    assert_eq!(errors[0].source_name, "b.yaml");
    assert!(errors[0].reason.contains("a.yaml"));
}

#[test]
fn a_directory_that_disappears_removes_no_policy() {
    let dir = tempfile::tempdir().unwrap();
    let policies = dir.path().join("policies");
    fs::create_dir(&policies).unwrap();
    write(&policies, "a.yaml", &good("x"));
    let mut source = PolicyDir::new(&policies);
    source.list();
    fs::rename(&policies, dir.path().join("elsewhere")).unwrap();
    assert_eq!(words(&source.refresh()), ["rejected 1"]);
}

/// The source of an agent that starts with the state of the last run in `state`.
fn start(state: &Path, dir: &Path) -> PolicyDir {
    let mut damaged = Vec::new();
    let kept = LastGood::open(state, dir, &mut damaged).unwrap();
    assert_eq!(damaged, Vec::<String>::new());
    PolicyDir::with_last_good(dir, kept)
}

/// Two files: documents a and b in one, c in the other.
fn three(dir: &Path) {
    write(dir, "one.yaml", &format!("{}---{}", good("a"), good("b")));
    write(dir, "two.yaml", &good("c"));
}

#[test]
fn a_file_that_is_torn_at_a_start_keeps_its_documents_and_one_that_is_deleted_does_not() {
    let (state, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (state, dir) = (state.path(), dir.path());
    three(dir);
    start(state, dir).list();
    let half = |text: &str| text[..text.len() / 2].to_owned();
    let whole = fs::read_to_string(dir.join("one.yaml")).unwrap();
    let broken = good("a").replace("toCIDR", "toCIDRR");
    for torn in [
        half(&whole),
        broken,
        "{{{".to_owned(),
        String::new(),
        "\0\0".to_owned(),
    ] {
        // Twice: a start also keeps a torn file for the next start.
        for _ in 0..2 {
            write(dir, "one.yaml", &torn);
            let kept = if torn.contains("toCIDRR") {
                // The repaired text has one document and names it, so the other document is
                // removed.
                vec!["init", "apply a", "apply c", "rejected 1", "done"]
            } else {
                vec![
                    "init",
                    "apply a",
                    "apply b",
                    "apply c",
                    "rejected 1",
                    "done",
                ]
            };
            assert_eq!(words(&start(state, dir).list()), kept, "{torn:?}");
        }
        three(dir);
        start(state, dir).list();
    }
    // The file exists and cannot be read.
    fs::remove_file(dir.join("one.yaml")).unwrap();
    std::os::unix::fs::symlink("/nowhere", dir.join("one.yaml")).unwrap();
    let all = [
        "init",
        "apply a",
        "apply b",
        "apply c",
        "rejected 1",
        "done",
    ];
    assert_eq!(words(&start(state, dir).list()), all);
    let elsewhere = dir.with_extension("elsewhere");
    fs::rename(dir, &elsewhere).unwrap();
    assert_eq!(words(&start(state, dir).list()), all);
    fs::rename(&elsewhere, dir).unwrap();
    // The file does not exist.
    fs::remove_file(dir.join("one.yaml")).unwrap();
    assert_eq!(
        words(&start(state, dir).list()),
        ["init", "apply c", "done"]
    );
    write(dir, "one.yaml", "{{{");
    assert_eq!(
        words(&start(state, dir).list()),
        ["init", "apply c", "rejected 1", "uncertain", "done"]
    );
}

#[test]
fn versions_stored_for_another_directory_are_not_used() {
    let (state, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let other = tempfile::tempdir().unwrap();
    three(dir.path());
    start(state.path(), dir.path()).list();
    write(other.path(), "one.yaml", "{{{");
    let mut source = start(state.path(), other.path());
    assert_eq!(
        words(&source.list()),
        ["init", "rejected 1", "uncertain", "done"]
    );
    write(other.path(), "one.yaml", &good("d"));
    assert_eq!(
        words(&source.refresh()),
        ["apply d", "rejected 0", "certain"]
    );
    // A file that is torn later has a good version.
    write(other.path(), "one.yaml", "{{{");
    assert_eq!(words(&source.refresh()), ["rejected 1"]);
}

#[test]
fn a_damaged_version_is_set_aside_and_one_of_a_later_release_stops_the_start() {
    let (state, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    three(dir.path());
    start(state.path(), dir.path()).list();
    let kept = state.path().join("policies/0.json");
    let text = fs::read_to_string(&kept).unwrap();
    fs::write(&kept, &text[..text.len() / 2]).unwrap();
    let mut damaged = Vec::new();
    LastGood::open(state.path(), dir.path(), &mut damaged).unwrap();
    assert!(damaged[0].contains("0.json.corrupt"), "{damaged:?}");
    fs::write(&kept, text.replacen("\"version\":1", "\"version\":2", 1)).unwrap();
    let error = LastGood::open(state.path(), dir.path(), &mut damaged).unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("0.json") && error.contains("newer release"),
        "{error}"
    );
}

#[test]
fn versions_that_cannot_be_stored_are_reported() {
    let (state, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    three(dir.path());
    let mut source = start(state.path(), dir.path());
    // A directory at the temporary file's path makes every write fail, even for root.
    fs::create_dir(state.path().join("policies/0.json.new")).unwrap();
    fs::create_dir(state.path().join("policies/1.json.new")).unwrap();
    let events = source.list();
    let rejected = events.iter().find_map(|event| match event {
        PolicyChange::Rejected(errors) => Some(errors),
        _ => None,
    });
    assert!(rejected.unwrap()[0].reason.contains("cannot be kept"));
    fs::remove_dir(state.path().join("policies/0.json.new")).unwrap();
    fs::remove_dir(state.path().join("policies/1.json.new")).unwrap();
    assert_eq!(words(&source.refresh()), ["rejected 0"]);
}

fn pod(name: &str, address: &str, note: usize) -> String {
    let note = "x".repeat(note);
    format!(
        r#"
- apiVersion: v1
  kind: Pod
  metadata:
    annotations:
      note: "{note}"
    labels:
      app: web
    name: {name}
    namespace: shop
  status:
    phase: Running
    podIP: {address}
"#
    )
}

fn list(items: &[String]) -> String {
    format!(
        "apiVersion: v1\nitems:\n{}kind: List\nmetadata:\n  resourceVersion: \"\"\n",
        items.concat()
    )
}

#[test]
fn an_item_of_a_long_list_that_is_too_large_is_refused_by_name_and_the_rest_is_accepted() {
    let dir = tempfile::tempdir().unwrap();
    let good = [pod("a", "10.2.0.1", 2 << 20), pod("b", "10.2.0.2", 2 << 20)];
    let large = [pod("c", "10.2.0.3", 4 << 20), pod("d", "10.2.0.4", 7 << 20)];
    write(
        dir.path(),
        "cluster.yaml",
        &list(&[&good[..], &large[..]].concat()),
    );
    let mut source = PolicyDir::new(dir.path());
    let events = source.list();
    assert_eq!(
        words(&events),
        [
            "init",
            "apply a",
            "apply b",
            "rejected 2",
            "uncertain",
            "done"
        ]
    );
    let Some(PolicyChange::Rejected(errors)) = events.get(3) else {
        panic!("{events:?}");
    };
    let keys: Vec<_> = errors.iter().map(|error| error.key.as_deref()).collect();
    assert_eq!(keys, [Some("Pod/shop/c"), Some("Pod/shop/d")]);
    assert!(source.refresh().is_empty());
    // An unreadable item keeps its last good version only.
    let bad = [
        good[0].replace("10.2.0.1", "10.2.0"),
        good[1].replace("app: web", "app: db"),
    ];
    write(dir.path(), "cluster.yaml", &list(&bad));
    assert_eq!(
        words(&source.refresh()),
        ["apply b", "rejected 1", "certain"]
    );
}

#[test]
fn objects_of_a_cluster_keep_their_last_good_version_across_a_restart() {
    let [state, dir] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let good = [pod("a", "10.2.0.1", 9), pod("b", "10.2.0.2", 9)];
    write(dir.path(), "cluster.yaml", &list(&good));
    start(state.path(), dir.path()).list();
    let bad = [
        good[0].replace("podIP: 10.2.0.1", "podIP: none"),
        good[1].clone(),
    ];
    write(dir.path(), "cluster.yaml", &list(&bad));
    let events = start(state.path(), dir.path()).list();
    assert_eq!(
        words(&events),
        ["init", "apply a", "apply b", "rejected 1", "done"]
    );
}

#[test]
fn an_object_of_a_kind_that_is_not_read_keeps_no_other_document_of_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (pod("a", "10.2.0.1", 0), pod("b", "10.2.0.2", 0));
    let deployment = "- apiVersion: apps/v1\n  kind: Deployment\n  metadata:\n    name: web\n    namespace: shop\n  spec:\n    replicas: 1\n".to_owned();
    let file = |items: &[&String]| list(&items.iter().map(|i| (*i).clone()).collect::<Vec<_>>());
    write(dir.path(), "cluster.yaml", &file(&[&a, &b, &deployment]));
    let mut source = PolicyDir::new(dir.path());
    assert_eq!(
        words(&source.list()),
        ["init", "apply a", "apply b", "rejected 1", "done"]
    );

    write(dir.path(), "cluster.yaml", &file(&[&a, &deployment]));
    assert_eq!(words(&source.refresh()), ["delete b"]);

    // A misspelt kind: the document of this name keeps its last good version.
    let misspelt = a.replace("kind: Pod", "kind: Pdo");
    write(dir.path(), "cluster.yaml", &file(&[&misspelt, &deployment]));
    assert_eq!(words(&source.refresh()), ["rejected 2"]);

    // The same for a document without a namespace, which then is `default`.
    let in_default = |kind: &str| {
        format!(
            "- apiVersion: v1\n  kind: {kind}\n  metadata:\n    name: c\n  status:\n    phase: Running\n    podIP: 10.2.0.3\n"
        )
    };
    write(dir.path(), "other.yaml", &file(&[&in_default("Pod")]));
    assert_eq!(words(&source.refresh()), ["apply c"]);
    write(dir.path(), "other.yaml", &file(&[&in_default("Pdo")]));
    assert_eq!(words(&source.refresh()), ["rejected 3"]);
    fs::remove_file(dir.path().join("other.yaml")).unwrap();
    assert_eq!(words(&source.refresh()), ["delete c", "rejected 2"]);

    // A kind of a group with policies may be a policy.
    let policy = "- apiVersion: networking.k8s.io/v1\n  kind: NetworkPolcy\n  metadata:\n    name: web\n    namespace: shop\n".to_owned();
    write(dir.path(), "cluster.yaml", &file(&[&a, &policy]));
    assert_eq!(words(&source.refresh()), ["rejected 1"]);
    write(dir.path(), "cluster.yaml", &file(&[&policy]));
    assert_eq!(words(&source.refresh()), [] as [&str; 0]);
}
