//! What a start and a later look deliver of the endpoints of the last run. Interface 1 is `lo` on
//! every machine.

use std::{fs, path::Path};

use super::*;
use crate::endpoint::link::Link;

type Events = Arc<Mutex<Vec<SourceEvent<EndpointSpec>>>>;

const KEY: &str = "dir/a.yaml";
/// No machine has an interface of this index.
const NO_INTERFACE: u32 = 0x7fff_fff0;

fn restored(key: &str, ifindex: u32, netns: &str) -> EndpointSpec {
    EndpointSpec {
        key: key.to_owned(),
        labels: vec!["k8s:app=a".to_owned()],
        ifindex,
        ifname: "lo".to_owned(),
        addresses: vec!["10.0.0.7".parse().unwrap()],
        mac: [2, 0, 0, 0, 0, 7],
        node_mac: [2, 0, 0, 0, 1, 7],
        on_bridge: false,
        link: Link::default(),
        netns: netns.to_owned(),
    }
}

fn open(dir: &Path, restored: EndpointSpec) -> (Arc<EndpointBook>, Events) {
    let events = Events::default();
    let told = Arc::clone(&events);
    let state = dir.join("state");
    fs::create_dir(&state).unwrap();
    let book = EndpointBook::open(
        Some(dir.join("endpoints")),
        CliFile::in_dir(&state),
        vec![restored],
        move |event| told.lock().push(event),
    );
    (book.unwrap(), events)
}

fn write(dir: &Path, text: &str) {
    let _exists = fs::create_dir(dir.join("endpoints"));
    fs::write(dir.join("endpoints/a.yaml"), text).unwrap();
}

fn reason(book: &EndpointBook) -> String {
    let unresolved = book.unresolved();
    let reason = unresolved.into_iter().find(|entry| entry.key == KEY);
    reason.map(|entry| entry.reason).unwrap_or_default()
}

#[test]
fn an_endpoint_whose_document_is_refused_at_a_start_stays_until_the_file_is_removed() {
    for wrong in [
        "netns: pod1\nlabels: ['k8s:']\n",
        "netns: pod1\nlabel: [k8s:app=a]\n",
    ] {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), wrong);
        let spec = restored(KEY, 1, "pod1");
        let (book, events) = open(dir.path(), spec.clone());
        book.list();
        let listed = std::mem::take(&mut *events.lock());
        assert!(
            listed.contains(&SourceEvent::Apply(spec)),
            "{wrong:?}: {listed:?}"
        );
        assert_ne!(reason(&book), "");
        book.follow();
        book.refresh();
        assert!(events.lock().is_empty());
        fs::remove_file(dir.path().join("endpoints/a.yaml")).unwrap();
        book.refresh();
        let gone = SourceEvent::Delete(KEY.to_owned());
        assert_eq!(*events.lock(), [gone]);
    }
}

#[test]
fn a_process_that_has_the_number_of_one_that_ended_does_not_get_its_endpoint() {
    let dir = tempfile::tempdir().unwrap();
    let (ended, other) = (std::process::id(), std::os::unix::process::parent_id());
    let text = |pid| format!("pid: {pid}\nifname: lo\nlabels: [k8s:app=a]\n");
    write(dir.path(), &text(ended));
    let spec = restored(KEY, NO_INTERFACE, &format!("pid-{ended}"));
    let (book, events) = open(dir.path(), spec);
    for look in [
        EndpointBook::list,
        EndpointBook::follow,
        EndpointBook::refresh,
    ] {
        look(&book);
        assert!(reason(&book).contains("add it again"), "{}", reason(&book));
    }
    assert_eq!(*events.lock(), [SourceEvent::Init, SourceEvent::InitDone]);
    // Another number is another process.
    write(dir.path(), &text(other));
    book.refresh();
    assert_ne!(reason(&book), "");
    assert!(!reason(&book).contains("add it again"), "{}", reason(&book));
}
