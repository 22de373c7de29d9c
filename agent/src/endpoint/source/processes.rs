//! Which process a document's number meant when its endpoint was found.
//!
//! After a process has ended, the kernel may give its number to another process. The boot and the start time show
//! whether the number still belongs to the same process.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use daemon::{
    lookup::Lookup,
    state_file::{read_or_set_aside, write_json},
};
use serde::{Deserialize, Serialize};
use shared_maps::user::boot_id;

use super::{NamespaceId, store};
use crate::endpoint::{container::start_time, discover::Netns};

/// A process, identified by its number, its start time and the boot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Process {
    pid: u32,
    /// Clock ticks after boot (proc(5), field 22 of /proc/PID/stat).
    started: u64,
    boot_id: String,
    /// Device and inode of its network namespace, if they could be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    netns: Option<NamespaceId>,
}

/// The process that has a document's number now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holder {
    /// The same process as when the endpoint was found. If no process is recorded, every process counts as the same.
    Same,
    Another,
}

impl Process {
    /// The process that has this number now.
    fn now(pid: u32) -> Lookup<Self> {
        match (start_time(pid), boot_id()) {
            (Lookup::Found(started), Ok(boot_id)) => Lookup::Found(Self {
                pid,
                started,
                boot_id,
                netns: fs::metadata(Netns::Pid(pid).path())
                    .ok()
                    .map(|file| (file.dev(), file.ino())),
            }),
            (Lookup::Gone, _) => Lookup::Gone,
            (Lookup::Unknown(error), _) | (_, Err(error)) => Lookup::Unknown(error),
        }
    }

    /// Whether both are the same process in the same namespace, as far as is known.
    fn is_same(&self, other: &Self) -> bool {
        let netns = self.netns.zip(other.netns);
        self.pid == other.pid
            && self.started == other.started
            && self.boot_id == other.boot_id
            && netns.is_none_or(|(one, other)| one == other)
    }
}

/// The processes of documents. They are stored in a file in the state directory, and in one in a directory that a boot
/// does not empty: without a file, a number would mean any process that has it.
#[derive(Default)]
pub(super) struct Processes {
    /// Paths of the file. The first one that exists counts.
    paths: Vec<PathBuf>,
    known: BTreeMap<String, Process>,
}

impl Processes {
    /// Reads the file in the state directory. If there is none, reads `stored`. If there is neither, a document means
    /// the process that has its number now. A file that cannot be used is set aside and added to `damaged`.
    pub(super) fn open(state: &Path, stored: Option<PathBuf>, damaged: &mut Vec<String>) -> Self {
        let own = Some(state.join("endpoint_processes.json"));
        let paths: Vec<PathBuf> = own.into_iter().chain(stored).collect();
        let read = paths.iter().find_map(|path| read(path, damaged));
        Self {
            known: read.unwrap_or_default(),
            paths,
        }
    }

    /// Whether the process that has this number now is certainly the one by which the endpoint was found.
    pub(super) fn is_known(&self, key: &str, pid: u32) -> bool {
        let then = self.known.get(key).filter(|then| then.pid == pid);
        let now = then.and_then(|_| Process::now(pid).found());
        then.zip(now).is_some_and(|(then, now)| then.is_same(&now))
    }

    /// Which process the number of a document belongs to.
    pub(super) fn look(&self, key: &str, pid: u32) -> Lookup<Holder> {
        match self.known.get(key).filter(|then| then.pid == pid) {
            None => Lookup::Found(Holder::Same),
            Some(then) => Process::now(pid).map(|now| match then.is_same(&now) {
                true => Holder::Same,
                false => Holder::Another,
            }),
        }
    }

    /// Records that the endpoint of a document was found by the number.
    pub(super) fn found(&mut self, key: &str, pid: Option<u32>) {
        let now = match pid.map(Process::now) {
            Some(Lookup::Unknown(error)) => {
                tracing::warn!(endpoint = key, %error, "cannot look at the endpoint's process; the record of it stays");
                return;
            }
            now => now.and_then(Lookup::found),
        };
        if self.known.get(key) == now.as_ref() {
            return;
        }
        match now {
            Some(now) => self.known.insert(key.to_owned(), now),
            None => self.known.remove(key),
        };
        self.write();
    }

    /// Forgets documents that are gone.
    pub(super) fn retain(&mut self, is_wanted: impl Fn(&String) -> bool) {
        let before = self.known.len();
        self.known.retain(|key, _| is_wanted(key));
        if self.known.len() != before {
            self.write();
        }
    }

    fn write(&self) {
        for path in &self.paths {
            let dir = path.parent().unwrap_or(Path::new("."));
            let written = store::make(dir).and_then(|()| write_json(path, &self.known));
            if let Err(error) = written {
                tracing::error!(path = %path.display(), %error, "cannot write the file with the endpoints' processes");
            }
        }
    }
}

/// `None` if there is no usable file.
fn read(path: &Path, damaged: &mut Vec<String>) -> Option<BTreeMap<String, Process>> {
    let why = match read_or_set_aside(path, |bytes| serde_json::from_slice(bytes)) {
        Ok(known) => return known,
        Err(why) => why,
    };
    let text = format!(
        "{}: the file with the endpoints' processes: {why}; if there is no copy \
         in --endpoint-store, an endpoint that was added by --pid is now of the process that has this \
         number",
        path.display()
    );
    tracing::error!("{text}");
    damaged.push(text);
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_means_the_process_that_had_it_first_also_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let own = std::process::id();
        let is_another = |processes: &Processes, key: &str, pid| {
            matches!(processes.look(key, pid), Lookup::Found(Holder::Another))
        };
        let open = || Processes::open(dir.path(), None, &mut Vec::new());
        let mut processes = open();
        assert!(!is_another(&processes, "a", own), "nothing is known");
        processes.found("a", Some(own));
        assert!(!is_another(&open(), "a", own));
        // The number was another process's, on this boot or on another one.
        for change in [
            |process: &mut Process| process.started -= 1,
            |process: &mut Process| process.boot_id.push('x'),
        ] {
            processes.found("a", Some(own));
            change(processes.known.get_mut("a").unwrap());
            processes.write();
            assert!(is_another(&open(), "a", own));
        }
        assert!(!is_another(&processes, "b", own));
        assert!(!is_another(&processes, "a", own + 1), "another number");
        processes.retain(|_| false);
        assert!(!is_another(&open(), "a", own));
    }
}
