//! What the first listing takes as it was, and when it is looked at. Interface 1 is `lo` on every machine. No machine
//! has the namespace, so that each look leaves a reason.

use std::{cell::Cell, fs, path::PathBuf, sync::Arc};

use agent_core::{endpoint::spec::EndpointSpec, source_event::SourceEvent};
use parking_lot::Mutex;

use super::{super::tests::restored, EndpointBook, FEW};
use crate::endpoint::{container::Containers, source::cli::CliFile};

const NETNS: &str = "hf-none-such";
/// No machine has an interface of this index.
const NO_INTERFACE: u32 = 0x7fff_fff0;

/// A state directory, a directory of endpoint documents, and the book.
struct Node {
    dir: tempfile::TempDir,
    book: Option<Arc<EndpointBook>>,
    events: Arc<Mutex<Vec<SourceEvent<EndpointSpec>>>>,
}

impl Node {
    /// Each document is the text of the file of the same number.
    fn new(documents: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for part in ["endpoints", "state"] {
            fs::create_dir(dir.path().join(part)).unwrap();
        }
        let node = Self {
            dir,
            book: None,
            events: Arc::default(),
        };
        for (number, text) in documents.iter().enumerate() {
            node.write(number, text);
        }
        node
    }

    fn path(&self, part: &str) -> PathBuf {
        self.dir.path().join(part)
    }

    fn write(&self, number: usize, text: &str) {
        fs::write(self.path(&format!("endpoints/{number}.yaml")), text).unwrap();
    }

    /// Opens the book after a takeover from an agent that had these endpoints.
    fn take_over(&mut self, restored: Vec<EndpointSpec>) -> &EndpointBook {
        let delivered = Arc::clone(&self.events);
        let book = EndpointBook::open(
            Some(self.path("endpoints")),
            CliFile::in_dir(&self.path("state")),
            Containers::of(&self.path("podman")),
            restored,
            None,
            move |event| delivered.lock().push(event),
        );
        let book = self.book.insert(book.unwrap());
        book.keep_found();
        book
    }

    /// The endpoints that the core has received since the last call, with their labels.
    fn received(&self) -> Vec<(String, Vec<String>)> {
        let events = std::mem::take(&mut *self.events.lock());
        let applied = events.into_iter().filter_map(|event| match event {
            SourceEvent::Apply(spec) => Some((spec.key, spec.labels)),
            _ => None,
        });
        applied.collect()
    }
}

fn key(number: usize) -> String {
    format!("dir/{number}.yaml")
}

fn document(label: &str) -> String {
    format!("netns: {NETNS}\nlabels: ['k8s:app={label}']\n")
}

fn on(number: usize, ifindex: u32, ifname: &str, netns: &str) -> EndpointSpec {
    let mut spec = restored(&key(number), ifindex, netns);
    ifname.clone_into(&mut spec.interface.ifname);
    spec
}

fn on_lo(number: usize) -> EndpointSpec {
    on(number, 1, "lo", NETNS)
}

/// The endpoints that were looked at: no look finds a namespace.
fn looked_at(book: &EndpointBook) -> Vec<String> {
    let unresolved = book.unresolved();
    unresolved.into_iter().map(|entry| entry.key).collect()
}

fn kept(book: &EndpointBook) -> Vec<String> {
    book.state.lock().kept.iter().cloned().collect()
}

#[test]
fn an_endpoint_is_listed_where_it_was_with_its_labels_of_now_and_looked_at_afterwards() {
    let mut node = Node::new(&[&document("b")]);
    node.take_over(vec![on_lo(0)]).list();
    let labels = vec!["k8s:app=b".to_owned()];
    assert_eq!(node.received(), [(key(0), labels)]);
    let book = node.book.as_deref().unwrap();
    assert_eq!(looked_at(book), Vec::<String>::new());
    // Neither a poll nor a new reading of the directory is the look.
    book.follow();
    book.follow_links();
    book.refresh();
    assert_eq!(looked_at(book), Vec::<String>::new());
    book.look_at_kept(|| false);
    assert_eq!(looked_at(book), [key(0)]);
    assert_eq!(kept(book), Vec::<String>::new());
    // Its interface is there, so that it keeps its policy.
    assert_eq!(*node.events.lock(), []);
}

#[test]
fn an_ordinary_start_looks_at_once() {
    let mut node = Node::new(&[&document("a")]);
    let book = node.take_over(vec![on_lo(0)]);
    book.state.lock().listing.keeps = false;
    book.list();
    assert_eq!(looked_at(book), [key(0)]);
    assert_eq!(kept(book), Vec::<String>::new());
}

#[test]
fn an_endpoint_without_its_interface_is_looked_at_at_once() {
    for spec in [
        on(0, NO_INTERFACE, "lo", NETNS),
        // Another interface has the number.
        on(0, 1, "hf-other", NETNS),
    ] {
        let mut node = Node::new(&[&document("a")]);
        let book = node.take_over(vec![spec]);
        book.list();
        assert_eq!(looked_at(book), [key(0)]);
        assert_eq!(kept(book), Vec::<String>::new());
        assert_eq!(node.received(), []);
    }
}

#[test]
fn an_endpoint_whose_document_names_a_process_or_a_bridge_is_looked_at_at_once() {
    let pid = std::process::id();
    let process = format!("pid: {pid}\nifname: hf-none\nlabels: [k8s:app=a]\n");
    let mut node = Node::new(&[&process]);
    let book = node.take_over(vec![on(0, 1, "lo", &format!("pid-{pid}"))]);
    book.list();
    assert_eq!(looked_at(book), [key(0)]);
    assert_eq!(kept(book), Vec::<String>::new());

    let bridge = "bridge: hf-none\nlabels: [k8s:app=a]\n";
    let mut node = Node::new(&[bridge]);
    let book = node.take_over(vec![on_lo(0)]);
    book.list();
    assert_eq!(kept(book), Vec::<String>::new());
    assert_eq!(node.received(), []);
}

#[test]
fn an_endpoint_without_a_document_is_not_kept() {
    let mut node = Node::new(&[]);
    let book = node.take_over(vec![on_lo(0)]);
    book.list();
    assert_eq!(kept(book), Vec::<String>::new());
    assert_eq!(node.received(), []);
}

#[test]
fn a_document_that_changes_before_the_look_is_looked_at_at_once() {
    let mut node = Node::new(&[&document("a")]);
    node.take_over(vec![on_lo(0)]).list();
    assert_eq!(kept(node.book.as_deref().unwrap()), [key(0)]);
    node.write(0, &document("c"));
    let book = node.book.as_deref().unwrap();
    book.refresh();
    assert_eq!(looked_at(book), [key(0)]);
    assert_eq!(kept(book), Vec::<String>::new());
}

#[test]
fn an_endpoint_whose_interface_goes_before_the_look_is_removed() {
    let mut node = Node::new(&[&document("a")]);
    node.take_over(vec![on_lo(0)]).list();
    node.events.lock().clear();
    let book = node.book.as_deref().unwrap();
    let mut state = book.state.lock();
    let found = state.found.get_mut(&key(0)).unwrap();
    found.spec.interface.ifindex = NO_INTERFACE;
    drop(state);
    book.follow();
    assert_eq!(*node.events.lock(), [SourceEvent::Delete(key(0))]);
    // The look finds nothing left to do.
    node.events.lock().clear();
    book.look_at_kept(|| false);
    assert_eq!(*node.events.lock(), []);
}

#[test]
fn the_looks_take_turns_with_others_and_end_with_the_agent() {
    let documents: Vec<String> = (0..2 * FEW + 1).map(|_| document("a")).collect();
    let texts: Vec<&str> = documents.iter().map(String::as_str).collect();
    let mut node = Node::new(&texts);
    node.take_over(Vec::new()).list();
    let book = node.book.as_deref().unwrap();
    let all: Vec<String> = (0..documents.len()).map(key).collect();
    book.state.lock().kept = all.iter().cloned().collect();
    book.look_at_kept(|| true);
    assert_eq!(kept(book).len(), all.len());
    // Each turn looks at a few. The lock is free between two turns.
    let left = Cell::new(Vec::new());
    book.look_at_kept(|| {
        let mut before = left.take();
        before.push(kept(book).len());
        left.set(before);
        false
    });
    assert_eq!(left.take(), [2 * FEW + 1, FEW + 1, 1]);
    assert_eq!(kept(book), Vec::<String>::new());
}

#[test]
fn an_endpoint_that_a_poll_has_found_meanwhile_is_not_looked_at_again() {
    let mut node = Node::new(&[&document("a")]);
    node.take_over(vec![on_lo(0)]).list();
    let book = node.book.as_deref().unwrap();
    assert_eq!(kept(book), [key(0)]);
    book.state.lock().marks.stale.clear();
    book.look_at_kept(|| false);
    assert_eq!(looked_at(book), Vec::<String>::new());
}
