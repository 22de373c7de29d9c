//! The first process of a container, read from the OCI runtime's own files.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use daemon::lookup::Lookup;
use nix::errno::Errno;
use serde::Deserialize;

use super::store;

/// A process of this boot. After its end, another process may get its number, but has another start time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    /// Clock ticks after boot.
    started: u64,
}

impl Process {
    /// The process that has this number now.
    pub(crate) fn now(pid: u32) -> Lookup<Self> {
        start_time(pid).map(|started| Self { pid, started })
    }

    /// `Gone` if no process has the number, or another one.
    pub(super) fn runs(&self) -> Lookup<()> {
        match start_time(self.pid) {
            Lookup::Found(started) if started == self.started => Lookup::Found(()),
            Lookup::Found(_) | Lookup::Gone => Lookup::Gone,
            Lookup::Unknown(error) => Lookup::Unknown(error),
        }
    }
}

/// When the process with this number started, in clock ticks after boot (proc(5), field 22 of /proc/PID/stat).
pub(crate) fn start_time(pid: u32) -> Lookup<u64> {
    let path = format!("/proc/{pid}/stat");
    let read = fs::read_to_string(&path);
    // Reading fails like this if the process ends after the file was opened.
    let ended = |error: &io::Error| error.raw_os_error() == Some(Errno::ESRCH as i32);
    if read.as_ref().is_err_and(ended) {
        return Lookup::Gone;
    }
    let at = |error: io::Error| io::Error::new(error.kind(), format!("{path}: {error}"));
    match Lookup::of_path(read) {
        Lookup::Found(stat) => match started(&stat) {
            Some(started) => Lookup::Found(started),
            None => Lookup::Unknown(at(io::ErrorKind::InvalidData.into())),
        },
        Lookup::Gone => Lookup::Gone,
        Lookup::Unknown(error) => Lookup::Unknown(at(error)),
    }
}

fn started(stat: &str) -> Option<u64> {
    // The name of the program, in brackets, may have spaces and brackets.
    let (_, fields) = stat.rsplit_once(") ")?;
    fields.split(' ').nth(19)?.parse().ok()
}

/// The fields that are read of runc's `state.json` and of crun's `status`.
#[derive(Deserialize)]
struct State {
    #[serde(alias = "pid")]
    init_process_pid: u32,
    #[serde(alias = "process-start-time")]
    init_process_start: u64,
}

/// The running process of the container `id`, by the directories `dirs` of OCI runtimes.
pub(super) fn in_states(dirs: &[PathBuf], id: &str) -> Lookup<Process> {
    for dir in dirs {
        for file in ["state.json", "status"] {
            match in_state(&dir.join(id).join(file)) {
                Lookup::Gone => {}
                found => return found,
            }
        }
    }
    Lookup::Gone
}

fn in_state(path: &Path) -> Lookup<Process> {
    let text = match store::read(path) {
        Ok(Some(text)) => text,
        Ok(None) => return Lookup::Gone,
        Err(error) => return Lookup::Unknown(error),
    };
    let state: State = match serde_json::from_slice(&text) {
        Ok(state) => state,
        Err(error) => {
            let text = format!("{}: {error}", path.display());
            return Lookup::Unknown(io::Error::other(text));
        }
    };
    let process = Process {
        pid: state.init_process_pid,
        started: state.init_process_start,
    };
    process.runs().map(|()| process)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_of_a_container_is_the_one_with_the_same_start() {
        let dir = tempfile::tempdir().unwrap();
        let pid = std::process::id();
        let started = start_time(pid).found().unwrap();
        let runc = |start| {
            format!(
                r#"{{"id":"a","init_process_pid":{pid},"init_process_start":{start},"x":{{}}}}"#
            )
        };
        let crun =
            |start| format!(r#"{{"pid":{pid},"process-start-time":{start},"owner":"root"}}"#);
        for (id, file, text) in [
            ("a", "state.json", runc(started)),
            ("b", "status", crun(started)),
        ] {
            fs::create_dir(dir.path().join(id)).unwrap();
            fs::write(dir.path().join(id).join(file), text).unwrap();
        }
        let dirs = [PathBuf::from("/does/not/exist"), dir.path().to_owned()];
        for id in ["a", "b"] {
            assert_eq!(in_states(&dirs, id).found().unwrap().pid, pid);
        }
        assert!(in_states(&dirs, "c").is_gone());
        fs::write(dir.path().join("a/state.json"), runc(started + 1)).unwrap();
        assert!(
            in_states(&dirs, "a").is_gone(),
            "another process has the number"
        );
        fs::write(dir.path().join("a/state.json"), "{").unwrap();
        assert!(matches!(in_states(&dirs, "a"), Lookup::Unknown(_)));
    }
}
