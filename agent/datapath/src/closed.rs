//! Closed interfaces, which no packet passes: interfaces of pods that the agent has not found.
//!
//! ```text
//!  <bpf-root>/holdfast/links/closed/<document>/in_<ifindex>         ingress
//!                                              out_<ifindex>        egress
//!                                              left-in_<ifindex>    ingress
//!                                              left-out_<ifindex>   egress
//! ```
//! `<document>` is a hash of the endpoint document's key. The programs stay attached without the agent. All are
//! detached when the document is removed or the interface is gone. The programs `in` and `out` are also detached once
//! the endpoint's own programs are attached to the interface, or when the document leads to another interface.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs, io,
    path::{Path, PathBuf},
};

use aya::{Ebpf, programs::TcAttachType};
use daemon::lookup::present;
use shared_maps::{pin, user::Globals};

use super::{
    filter::Order,
    group,
    hook::{Hook, grouped, is_under_policy, pinned, put, release},
    program::{ProgramError, Programs, program},
    unclaimed::ClosedNames,
};

const PROGRAM: &str = "closed";

/// Why an interface is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It leads to a pod whose endpoint is not found, or not under policy yet.
    NotFound,
    /// It leads to a namespace that an endpoint has left.
    Left,
}

impl Why {
    const ALL: [Self; 2] = [Self::NotFound, Self::Left];

    /// Both directions, each with the prefix of its pins.
    fn hooks(self) -> [(Hook, &'static str); 2] {
        let [ingress, egress] = match self {
            Self::NotFound => ["in", "out"],
            Self::Left => ["left-in", "left-out"],
        };
        let hook = |direction| Hook {
            program: PROGRAM,
            direction,
        };
        [
            (hook(TcAttachType::Ingress), ingress),
            (hook(TcAttachType::Egress), egress),
        ]
    }

    fn of_pin(name: &str) -> Option<(Self, u32)> {
        let (prefix, ifindex) = name.split_once('_')?;
        let is_of = |why: &Self| why.hooks().iter().any(|(_, of)| *of == prefix);
        let why = Self::ALL.into_iter().find(is_of)?;
        Some((why, ifindex.parse().ok()?))
    }

    /// An interface that was left has the endpoint's own programs until the endpoint is attached
    /// elsewhere: those programs stay first.
    fn order(self) -> Order {
        match self {
            Self::NotFound => Order::First,
            Self::Left => Order::Last,
        }
    }
}

/// Closed interfaces by the document that keeps them closed.
pub type Closed = BTreeMap<DocumentHash, BTreeMap<u32, Why>>;

/// Closes host-side interfaces, and opens them again.
pub trait Gate: Send {
    /// Lets nothing pass an interface, on behalf of the document `key`, until [`Self::open`].
    fn close(&mut self, key: &str, ifindex: u32, why: Why) -> Result<(), ProgramError>;
    /// Puts a closed interface into the group again, if another program took it out: netfilter drops what is not
    /// judged.
    fn keep(&mut self, ifindex: u32) -> Result<(), ProgramError>;
    /// Opens an interface, unless a document other than `document` keeps it closed.
    fn open(&mut self, document: &DocumentHash, ifindex: u32) -> Result<(), ProgramError>;
    /// Interfaces that documents keep closed.
    fn closed(&self) -> io::Result<Closed>;
    /// Lets nothing pass the interfaces of these names, and of no others, unless they are endpoints'.
    fn close_names(&mut self, interfaces: &BTreeSet<String>) -> io::Result<()>;
    /// Whether the programs of an endpoint are attached to an interface. An interface that cannot
    /// be inspected counts as one without them: it is closed, or stays closed.
    fn is_under_policy(&self, ifindex: u32) -> bool;
}

/// Hash of the key of an endpoint document. It names a file in place of the key, because keys may have
/// dots, which the BPF file system does not allow in names.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DocumentHash(String);

impl DocumentHash {
    /// FNV-1a, which is the same in every release.
    pub fn of(key: &str) -> Self {
        let hash = key.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        Self(format!("{hash:016x}"))
    }
}

impl fmt::Display for DocumentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The gate of the kernel.
pub struct ClosedInterfaces {
    programs: Programs,
    globals: Globals,
    names: ClosedNames,
    loaded: Option<Ebpf>,
}

impl ClosedInterfaces {
    /// Keeps the pins of closed interfaces below the root of `globals`.
    pub fn new(programs: Programs, globals: Globals, names: ClosedNames) -> Self {
        Self {
            programs,
            globals,
            names,
            loaded: None,
        }
    }

    /// Uses a program that was loaded ahead.
    #[must_use]
    pub fn with(mut self, loaded: Option<Ebpf>) -> Self {
        self.loaded = loaded;
        self
    }

    /// Loads the program, so that the first interface is closed without delay.
    pub fn load(&mut self) -> Result<&mut Ebpf, ProgramError> {
        let loaded = match self.loaded.take() {
            Some(loaded) => loaded,
            None => load(&self.programs)?,
        };
        Ok(self.loaded.insert(loaded))
    }
}

/// Loads the program that lets nothing pass.
pub(super) fn load(programs: &Programs) -> Result<Ebpf, ProgramError> {
    programs.load_without_endpoint(PROGRAM, 0)
}

impl Gate for ClosedInterfaces {
    fn close(&mut self, key: &str, ifindex: u32, why: Why) -> Result<(), ProgramError> {
        let dir = directory(&self.globals).join(DocumentHash::of(key).0);
        fs::create_dir_all(&dir).map_err(|error| pinned(&dir, &error))?;
        let attach = self.programs.attach_by();
        let loaded = self.load()?;
        for (hook, prefix) in why.hooks() {
            let path = dir.join(format!("{prefix}_{ifindex}"));
            let program = program(loaded, PROGRAM)?;
            put(program, (hook, attach), ifindex, &path, why.order())?;
        }
        group::join(ifindex).map_err(|error| grouped(ifindex, &error))
    }

    fn keep(&mut self, ifindex: u32) -> Result<(), ProgramError> {
        group::join(ifindex).map_err(|error| grouped(ifindex, &error))
    }

    fn open(&mut self, document: &DocumentHash, ifindex: u32) -> Result<(), ProgramError> {
        let dir = directory(&self.globals).join(&document.0);
        Why::ALL
            .into_iter()
            .try_for_each(|why| open_in(&dir, ifindex, why))
    }

    fn closed(&self) -> io::Result<Closed> {
        let mut found = BTreeMap::new();
        for dir in documents(&self.globals)? {
            let mut interfaces = BTreeMap::new();
            for entry in fs::read_dir(&dir)? {
                let name = entry?.file_name();
                if let Some((why, ifindex)) = name.to_str().and_then(Why::of_pin) {
                    interfaces.insert(ifindex, why);
                }
            }
            if let Some(name) = dir.file_name().and_then(|name| name.to_str()) {
                found.insert(DocumentHash(name.to_owned()), interfaces);
            }
        }
        Ok(found)
    }

    fn close_names(&mut self, interfaces: &BTreeSet<String>) -> io::Result<()> {
        self.names
            .set_interfaces(interfaces)
            .map_err(io::Error::other)
    }

    fn is_under_policy(&self, ifindex: u32) -> bool {
        is_under_policy(&self.globals.root().join(pin::LINKS), ifindex)
    }
}

/// Opens an interface whose endpoint has its own programs there now.
pub(super) fn open(globals: &Globals, ifindex: u32) -> Result<(), ProgramError> {
    let root = directory(globals);
    let documents = documents(globals).map_err(|error| pinned(&root, &error))?;
    let mut documents = documents.iter();
    documents.try_for_each(|dir| open_in(dir, ifindex, Why::NotFound))
}

fn open_in(dir: &Path, ifindex: u32, why: Why) -> Result<(), ProgramError> {
    for (_, prefix) in why.hooks() {
        release(&dir.join(format!("{prefix}_{ifindex}")))?;
    }
    // This fails if the directory is not empty: other interfaces are closed for the same document.
    let _ = fs::remove_dir(dir);
    Ok(())
}

fn directory(globals: &Globals) -> PathBuf {
    globals.root().join(pin::CLOSED_LINKS)
}

/// Directories of the documents that keep interfaces closed.
fn documents(globals: &Globals) -> io::Result<Vec<PathBuf>> {
    let entries = present(fs::read_dir(directory(globals)))?;
    let entries = entries.into_iter().flatten();
    entries.map(|entry| Ok(entry?.path())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pin_contains_why_its_interface_is_closed() {
        for why in Why::ALL {
            for (_, prefix) in why.hooks() {
                assert_eq!(Why::of_pin(&format!("{prefix}_17")), Some((why, 17)));
            }
        }
        assert_eq!(Why::of_pin("in_x"), None);
        assert_eq!(Why::of_pin("other_17"), None);
    }

    #[test]
    fn a_document_has_the_same_hash_in_every_release() {
        let DocumentHash(hash) = DocumentHash::of("dir/pods.yaml");
        assert_eq!(hash, "2e00d78e485d523e");
    }
}
