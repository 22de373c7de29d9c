//! What happens to the endpoints of the last run at a start, and when the agent looks again later. Interface 1 is `lo`
//! on every machine.

use std::{fs, os::fd::OwnedFd, path::Path};

use agent_core::endpoint::spec::PodInterface;
use agent_datapath::{
    closed::{Closed, DocumentHash, Why},
    program::ProgramError,
};
use shared_maps::user::InterfaceNames;

use super::{gated::Until, *};

type Events = Arc<Mutex<Vec<SourceEvent<EndpointSpec>>>>;

const KEY: &str = "dir/a.yaml";
/// No machine has an interface of this index.
const NO_INTERFACE: u32 = 0x7fff_fff0;

pub(super) fn restored(key: &str, ifindex: u32, netns: &str) -> EndpointSpec {
    EndpointSpec {
        key: key.to_owned(),
        labels: vec!["k8s:app=a".to_owned()],
        interface: PodInterface {
            ifindex,
            ifname: "lo".to_owned(),
            mac: [2, 0, 0, 0, 0, 7],
            node_mac: [2, 0, 0, 0, 1, 7],
            on_bridge: false,
            link: Default::default(),
        },
        addresses: vec!["10.0.0.7".parse().unwrap()],
        netns: netns.to_owned(),
        pod: None,
        pod_uid: None,
    }
}

fn open(dir: &Path, restored: EndpointSpec) -> (Arc<EndpointBook>, Events) {
    let events = Events::default();
    let delivered = Arc::clone(&events);
    let state = dir.join("state");
    let _exists = fs::create_dir(&state);
    let containers = Containers::of(&dir.join("podman"));
    let book = EndpointBook::open(
        Some(dir.join("endpoints")),
        CliFile::in_dir(&state),
        containers,
        vec![restored],
        None,
        move |event| delivered.lock().push(event),
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

/// At every kind of look, the reason says that the endpoint's process has ended.
fn stays_ended_at_every_look(book: &EndpointBook) {
    for look in [
        EndpointBook::list,
        EndpointBook::follow,
        EndpointBook::refresh,
    ] {
        look(book);
        assert!(reason(book).contains("the new pid"), "{}", reason(book));
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
    stays_ended_at_every_look(&book);
    assert_eq!(*events.lock(), [SourceEvent::Init, SourceEvent::InitDone]);
    // A changed number means another process.
    write(dir.path(), &text(other));
    book.refresh();
    assert_ne!(reason(&book), "");
    assert!(!reason(&book).contains("the new pid"), "{}", reason(&book));
}

#[test]
fn a_process_that_got_the_number_while_the_agent_was_away_does_not_get_the_endpoint() {
    let dir = tempfile::tempdir().unwrap();
    let pid = std::process::id();
    write(
        dir.path(),
        &format!("pid: {pid}\nifname: lo\nlabels: [k8s:app=a]\n"),
    );
    fs::create_dir(dir.path().join("state")).unwrap();
    let earlier = format!(r#"{{"{KEY}":{{"pid":{pid},"started":1,"boot_id":"b"}}}}"#);
    fs::write(dir.path().join("state/endpoint_processes.json"), earlier).unwrap();
    let (book, events) = open(dir.path(), restored("dir/other.yaml", NO_INTERFACE, "pod1"));
    stays_ended_at_every_look(&book);
    assert_eq!(*events.lock(), [SourceEvent::Init, SourceEvent::InitDone]);
}

/// A gate that only records which interfaces are closed.
#[derive(Default)]
struct Remembered(Arc<Mutex<BTreeSet<u32>>>);

impl Gate for Remembered {
    fn close(&mut self, _key: &str, ifindex: u32, _why: Why) -> Result<(), ProgramError> {
        self.0.lock().insert(ifindex);
        Ok(())
    }

    fn keep(&mut self, ifindex: u32) -> Result<(), ProgramError> {
        assert!(self.0.lock().contains(&ifindex));
        Ok(())
    }

    fn open(&mut self, _document: &DocumentHash, ifindex: u32) -> Result<(), ProgramError> {
        self.0.lock().remove(&ifindex);
        Ok(())
    }

    fn closed(&self) -> std::io::Result<Closed> {
        Ok(Closed::new())
    }

    fn close_names(&mut self, _interfaces: &BTreeSet<String>) -> std::io::Result<()> {
        Ok(())
    }

    fn is_under_policy(&self, ifindex: u32) -> bool {
        ifindex == 2
    }
}

#[test]
fn a_closed_interface_opens_when_it_is_under_policy_or_its_document_is_removed() {
    let gate = Remembered::default();
    let closed = Arc::clone(&gate.0);
    let mut gated = Gated::new(Some(Box::new(gate)), Interfaces::default());
    let is = |expected: &[u32]| assert_eq!(*closed.lock(), expected.iter().copied().collect());
    // Interface 2 has the programs of an endpoint, so it is closed only if its namespace was replaced.
    assert!(!gated.close(KEY, 2, Until::Attached));
    assert!(gated.close(KEY, 1, Until::Attached));
    is(&[1]);
    gated.settle(|_| true, &BTreeSet::new());
    is(&[1]);
    // Another document describes the endpoint at interface 1 now. The endpoint is not under policy yet.
    gated.settle(|_| false, &BTreeSet::from([1]));
    is(&[1]);
    gated.settle(|_| false, &BTreeSet::new());
    is(&[]);
    assert_eq!(gated.unresolved(KEY, &BTreeSet::from([1])), ["lo"]);
    is(&[1]);
    gated.resolved(KEY, 1);
    is(&[1]);
    gated.unresolved(KEY, &BTreeSet::new());
    is(&[]);
    assert!(gated.close(KEY, 1, Until::Gone));
    gated.resolved(KEY, 3);
    gated.settle(|_| true, &BTreeSet::new());
    is(&[1]);
    assert_eq!(gated.len(), 1);
}

/// Every look-up of an interface fails for another reason than a missing interface.
fn blind() -> Interfaces {
    let no_socket = fs::File::open("/dev/null").unwrap();
    Interfaces::through(InterfaceNames::from(OwnedFd::from(no_socket)))
}

#[test]
fn an_endpoint_stays_while_its_interface_cannot_be_looked_for() {
    for look in [
        EndpointBook::follow,
        EndpointBook::refresh,
        EndpointBook::follow_links,
    ] {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "netns: hf-none-such\nlabels: [k8s:app=a]\n");
        let (book, events) = open(dir.path(), restored(KEY, 1, "hf-none-such"));
        book.list();
        events.lock().clear();
        assert_eq!(book.blind(), None);
        book.state.lock().interfaces = blind();
        book.state.lock().problems.retries.reset();
        look(&book);
        assert_eq!(*events.lock(), []);
        let problem = book.blind().unwrap();
        assert!(problem.contains("interface number 1: "), "{problem}");
        // Now it is certain that there is none, and that the namespace is gone, too.
        book.state.lock().interfaces = Interfaces::default();
        book.state
            .lock()
            .found
            .get_mut(KEY)
            .unwrap()
            .spec
            .interface
            .ifindex = NO_INTERFACE;
        book.state.lock().problems.retries.reset();
        look(&book);
        assert_eq!(*events.lock(), [SourceEvent::Delete(KEY.to_owned())]);
        assert_eq!(book.blind(), None);
    }
}

#[test]
fn an_endpoint_stays_without_its_interface_while_its_namespace_cannot_be_looked_at() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    // ENOTDIR: a parent is something else than before.
    let netns = file.join("ns").to_string_lossy().into_owned();
    write(
        dir.path(),
        &format!("netns: {netns}\nlabels: [k8s:app=a]\n"),
    );
    let spec = restored(KEY, NO_INTERFACE, &netns);
    let (book, events) = open(dir.path(), spec.clone());
    book.list();
    assert!(events.lock().contains(&SourceEvent::Apply(spec)));
    events.lock().clear();
    for look in [EndpointBook::follow_links, EndpointBook::refresh] {
        look(&book);
        assert_eq!(*events.lock(), []);
        assert!(
            reason(&book).contains("cannot be opened"),
            "{}",
            reason(&book)
        );
    }
    fs::remove_file(&file).unwrap();
    book.follow_links();
    assert_eq!(*events.lock(), [SourceEvent::Delete(KEY.to_owned())]);
}

#[test]
fn a_pod_stays_in_the_list_while_its_namespace_cannot_be_looked_at() {
    let dir = tempfile::tempdir().unwrap();
    let (state, file) = (dir.path().join("state"), dir.path().join("file"));
    fs::create_dir(&state).unwrap();
    fs::write(&file, "").unwrap();
    let key = "cni/c0ffee/eth0";
    let netns = file.join("ns").to_string_lossy().into_owned();
    let document = EndpointDocument {
        netns: Some(netns.clone()),
        ifname: "eth0".to_owned(),
        pod: Some("shop/web-0".to_owned()),
        ..EndpointDocument::default()
    };
    let list = CniFile::in_dir(&state);
    list.write([(&key.to_owned(), &document)].into_iter())
        .unwrap();
    let (book, events) = open(dir.path(), restored(key, NO_INTERFACE, &netns));
    let is_listed = || list.read(&[], &mut Vec::new()).unwrap().contains_key(key);
    book.list();
    book.follow();
    book.refresh();
    assert!(is_listed());
    let removed = SourceEvent::Delete(key.to_owned());
    assert!(!events.lock().contains(&removed));
    fs::remove_file(&file).unwrap();
    book.follow();
    assert!(!is_listed() && events.lock().contains(&removed));
}

#[test]
fn a_closed_interface_stays_closed_while_nothing_can_be_looked_for() {
    let gate = Remembered::default();
    let closed = Arc::clone(&gate.0);
    let interfaces = blind();
    let mut gated = Gated::new(Some(Box::new(gate)), interfaces);
    assert!(gated.close(KEY, 7, Until::Found));
    gated.settle(|_| true, &BTreeSet::new());
    assert_eq!(gated.waiting(KEY), [7]);
    assert_eq!(*closed.lock(), BTreeSet::from([7]));
}

#[test]
fn a_document_has_labels_or_a_pod() {
    let read = |text: &str| serde_json::from_str::<EndpointDocument>(text).unwrap();
    let good = read(r#"{"netns": "pod1", "pod": "shop/web-0"}"#);
    good.check().unwrap();
    for (text, says) in [
        (r#"{"netns": "pod1"}"#, "labels is empty"),
        (
            r#"{"netns": "pod1", "pod": "web-0"}"#,
            "pod: `web-0` is not a pod",
        ),
        (
            r#"{"netns": "pod1", "pod": "a/b/c"}"#,
            "pod: `a/b/c` is not a pod",
        ),
        (
            r#"{"netns": "pod1", "pod": "shop/web-0", "labels": ["k8s:app=web"]}"#,
            "labels stands beside pod",
        ),
        (
            r#"{"netns": "pod1", "pod": "shop/web-0", "named-ports": ["http=80"]}"#,
            "named-ports stands beside pod",
        ),
    ] {
        let error = read(text).check().unwrap_err().to_string();
        assert!(error.starts_with(says), "{error}");
    }
}

#[test]
fn an_interface_that_is_an_endpoint_already_has_a_remedy_that_can_be_done() {
    let taken = |other: &str| {
        let error = EndpointError::Taken {
            netns: Netns::Name("pod1".to_owned()),
            ifname: "eth0".to_owned(),
            other: other.to_owned(),
        };
        error.to_string()
    };
    for (other, remedy) in [
        (
            "cli/pod1/eth0",
            "(`holdfast-agent endpoint remove cli/pod1/eth0`)",
        ),
        (
            "dir/a.yaml",
            "remove the document of that one in --endpoint-dir",
        ),
        (
            "netns/cni-1",
            "under policy itself, with the labels of its Pod: remove this document",
        ),
        (
            "cni/c0ffee/eth0",
            "under policy itself, with the labels of its Pod: remove this document",
        ),
    ] {
        let says = taken(other);
        assert!(
            says.contains(&format!("already endpoint {other}; ")),
            "{says}"
        );
        assert!(says.contains(remedy), "{says}");
    }
}

#[test]
fn a_document_names_an_interface_as_the_kernel_could_have_it() {
    let check = |field: &str, name: &str| {
        let value = serde_json::json!({ field: name, "labels": ["k8s:app=web"] });
        EndpointDocument::read(value).unwrap().unwrap().check()
    };
    for field in ["interface", "bridge"] {
        for name in ["br0", "vb-web", "a.b", "a%d", "fifteen-bytes-x"] {
            check(field, name).unwrap();
        }
        for name in ["", "..", "a/b", "a b", "a\nb", "a:1", "sixteen-bytes-xx"] {
            let error = check(field, name).unwrap_err().to_string();
            assert!(
                error.starts_with(field) && error.contains("15 bytes"),
                "{name:?}: {error}"
            );
        }
    }
}
