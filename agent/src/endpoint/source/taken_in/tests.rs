//! Which namespaces are looked into.

use std::os::unix::fs::symlink;

use nix::{sys::stat::Mode, unistd::mkfifo};
use tempfile::TempDir;

use super::*;
use crate::endpoint::{container::Containers, source::cli::CliFile};

const OWN: &str = "/proc/self/ns/net";

struct Node {
    dir: TempDir,
    book: Arc<EndpointBook>,
}

impl Node {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("netns")).unwrap();
        let file = CliFile::in_dir(dir.path());
        let containers = Containers::of(&dir.path().join("podman"));
        let book = EndpointBook::open(None, file, containers, Vec::new(), None, |_| {}).unwrap();
        let (_, pods) = watch::channel(Arc::default());
        let netns_dir = Some(dir.path().join("netns"));
        book.take_in_from(PodSource { pods, netns_dir });
        Self { dir, book }
    }

    fn path(&self, file: &str) -> PathBuf {
        self.dir.path().join("netns").join(file)
    }

    /// Files that may be a pod's.
    fn free(&self) -> Vec<String> {
        let mut state = self.book.state.lock();
        let free = state.free_namespaces(&self.dir.path().join("netns"));
        free.unwrap().into_keys().collect()
    }
}

#[test]
fn a_new_namespace_with_the_number_of_a_removed_one_is_a_pods() {
    let node = Node::new();
    symlink(OWN, node.path("cni-a")).unwrap();
    assert_eq!(node.free(), ["cni-a"]);
    node.book.state.lock().leave(&node.path("cni-a"));
    assert!(node.free().is_empty(), "the runtime removed its pod");
    // The kernel gives the lowest free number to the next namespace.
    fs::remove_file(node.path("cni-a")).unwrap();
    symlink(OWN, node.path("cni-b")).unwrap();
    assert_eq!(node.free(), ["cni-b"]);
    // The runtime adds a pod in a namespace from which it removed one.
    node.book.state.lock().leave(&node.path("cni-b"));
    assert!(node.free().is_empty());
    node.book.state.lock().enter_again(&node.path("cni-b"));
    assert_eq!(node.free(), ["cni-b"]);
}

#[test]
fn files_that_are_no_namespaces_are_not_opened() {
    let node = Node::new();
    mkfifo(&node.path("fifo"), Mode::S_IRWXU).unwrap();
    fs::write(node.path("left"), "").unwrap();
    fs::create_dir(node.path("directory")).unwrap();
    symlink("nowhere", node.path("broken")).unwrap();
    symlink(OWN, node.path("cni-a")).unwrap();
    assert_eq!(node.free(), ["cni-a"]);
}
