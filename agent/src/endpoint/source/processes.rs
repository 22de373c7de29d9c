//! Which process a document's number meant when its endpoint was found.
//!
//! The kernel gives the number of a process that ended to another one. The boot and the start
//! time say whether it is the same.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use shared_maps::user::boot_id;

use crate::datapath::files::write_atomic;

/// A process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Process {
    pid: u32,
    /// Clock ticks after boot (proc(5), field 22 of /proc/PID/stat).
    started: u64,
    boot_id: String,
}

impl Process {
    /// The process that has a number now.
    fn now(pid: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name of the program, in brackets, may have spaces and brackets.
        let (_, fields) = stat.rsplit_once(") ")?;
        Some(Self {
            pid,
            started: fields.split(' ').nth(19)?.parse().ok()?,
            boot_id: boot_id().ok()?,
        })
    }
}

/// The processes of documents, in the state directory.
#[derive(Default)]
pub(super) struct Processes {
    path: PathBuf,
    known: BTreeMap<String, Process>,
}

impl Processes {
    /// Reads the file. Without it, a document means the process that has its number now.
    pub(super) fn open(state: &Path) -> Self {
        let path = state.join("endpoint_processes.json");
        let known = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
            read => read.and_then(|bytes| Ok(serde_json::from_slice(&bytes)?)),
        };
        let known = known.unwrap_or_else(|error| {
            tracing::error!(path = %path.display(), %error, "cannot read the file with the endpoints' processes");
            BTreeMap::new()
        });
        Self { path, known }
    }

    /// Whether the number of a document belongs to another process than when it was found.
    pub(super) fn is_another(&self, key: &str, pid: u32) -> bool {
        let then = self.known.get(key).filter(|then| then.pid == pid);
        then.is_some_and(|then| Process::now(pid).is_some_and(|now| now != *then))
    }

    /// The endpoint of a document was found by the number.
    pub(super) fn found(&mut self, key: &str, pid: Option<u32>) {
        let now = pid.and_then(Process::now);
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
        let written = serde_json::to_vec_pretty(&self.known)
            .map_err(io::Error::from)
            .and_then(|text| write_atomic(&self.path, &text));
        if let Err(error) = written {
            tracing::error!(path = %self.path.display(), %error, "cannot write the file with the endpoints' processes");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_means_the_process_that_had_it_first_also_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let own = std::process::id();
        let mut processes = Processes::open(dir.path());
        assert!(!processes.is_another("a", own), "nothing is known");
        processes.found("a", Some(own));
        assert!(!Processes::open(dir.path()).is_another("a", own));
        // The number was another process's, on this boot or on another one.
        for change in [
            |process: &mut Process| process.started -= 1,
            |process: &mut Process| process.boot_id.push('x'),
        ] {
            processes.found("a", Some(own));
            change(processes.known.get_mut("a").unwrap());
            processes.write();
            assert!(Processes::open(dir.path()).is_another("a", own));
        }
        assert!(!processes.is_another("b", own));
        assert!(!processes.is_another("a", own + 1), "another number");
        processes.retain(|_| false);
        assert!(!Processes::open(dir.path()).is_another("a", own));
    }
}
