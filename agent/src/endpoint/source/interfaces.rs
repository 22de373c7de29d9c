//! Whether a host-side interface exists, and which namespace a document names.

use std::{fs, io, os::unix::fs::MetadataExt as _, sync::Arc};

use daemon::lookup::Lookup;
use parking_lot::Mutex;
use shared_maps::user::InterfaceNames;

use crate::endpoint::discover::Netns;

/// Device and inode of a network namespace. The inode may be used again once the namespace and its interfaces are
/// gone.
pub(super) type NamespaceId = (u64, u64);

/// Looks for interfaces of this network namespace. Clones share one socket.
#[derive(Clone, Debug, Default)]
pub(super) struct Interfaces(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// Open from the first look-up on.
    names: Option<InterfaceNames>,
    /// Why the last look-up gave no answer.
    failure: Option<String>,
}

impl Interfaces {
    /// Looks interfaces up through `names`.
    #[cfg(test)]
    pub(super) fn through(names: InterfaceNames) -> Self {
        Self(Arc::new(Mutex::new(State {
            names: Some(names),
            failure: None,
        })))
    }

    /// The name of an interface.
    pub(super) fn name(&self, ifindex: u32) -> Lookup<String> {
        let mut state = self.0.lock();
        let found = Lookup::of_interface(state.look(ifindex));
        state.failure = match &found {
            Lookup::Found(_) | Lookup::Gone => None,
            Lookup::Unknown(error) => Some(format!("interface number {ifindex}: {error}")),
        };
        found
    }

    /// Why the last look-up gave no answer: for `status`.
    pub(super) fn failure(&self) -> Option<String> {
        self.0.lock().failure.clone()
    }

    /// Name of an interface, for people.
    pub(super) fn describe(&self, ifindex: u32) -> String {
        match self.name(ifindex) {
            Lookup::Found(name) => name,
            Lookup::Gone | Lookup::Unknown(_) => format!("number {ifindex}"),
        }
    }
}

impl State {
    fn look(&mut self, ifindex: u32) -> io::Result<String> {
        let names = match self.names.take() {
            Some(names) => names,
            None => InterfaceNames::open()?,
        };
        self.names.insert(names).name(ifindex)
    }
}

/// Which namespace a name stands for now. A process id does not identify a namespace, because
/// another process may get the same id later.
pub(super) fn namespace_id(netns: &Netns) -> Lookup<NamespaceId> {
    if let Netns::Pid(_) = netns {
        let reason = "a process id does not identify a network namespace";
        return Lookup::Unknown(io::Error::other(reason));
    }
    let found = Lookup::of_path(fs::metadata(netns.path()));
    found.map(|file| (file.dev(), file.ino()))
}
