//! The policy directory with good and bad documents.

use std::{fs, path::Path};

use holdfast_agent::{
    core::{Event, event::SourceEvent},
    policy::source::dir::PolicyDir,
};

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

/// Events in words.
fn words(events: &[Event]) -> Vec<String> {
    events
        .iter()
        .map(|event| match event {
            Event::Policies(SourceEvent::Init) => "init".to_owned(),
            Event::Policies(SourceEvent::InitDone) => "done".to_owned(),
            Event::Policies(SourceEvent::Apply(document)) => {
                format!("apply {}", name(&document.key))
            }
            Event::Policies(SourceEvent::Delete(key)) => format!("delete {}", name(key)),
            Event::PoliciesRejected(errors) => format!("rejected {}", errors.len()),
            other => panic!("{other:?}"),
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

    // Text that is no YAML: nothing of the file goes.
    write(dir.path(), "one.yaml", "{{{");
    assert_eq!(words(&source.refresh()), ["rejected 1"]);

    // Mended: the document that was left out is gone, the complaint too.
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
fn two_files_with_the_same_document_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "a.yaml", &good("x"));
    write(dir.path(), "b.yaml", &good("x"));
    write(dir.path(), ".hidden.yaml", &good("y"));
    write(dir.path(), "notes.txt", "no policy");
    let mut source = PolicyDir::new(dir.path());
    let events = source.list();
    assert_eq!(words(&events), ["init", "apply x", "rejected 1", "done"]);
    let Some(Event::PoliciesRejected(errors)) = events.get(2) else {
        panic!("{events:?}");
    };
    assert_eq!(errors[0].source_name, "b.yaml");
    assert!(errors[0].reason.contains("a.yaml"));
}

#[test]
fn a_directory_that_goes_away_takes_nothing_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let policies = dir.path().join("policies");
    fs::create_dir(&policies).unwrap();
    write(&policies, "a.yaml", &good("x"));
    let mut source = PolicyDir::new(&policies);
    source.list();
    fs::rename(&policies, dir.path().join("elsewhere")).unwrap();
    assert_eq!(words(&source.refresh()), ["rejected 1"]);
}
