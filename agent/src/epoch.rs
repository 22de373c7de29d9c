//! Which run of the agent this is, and that there is only one.

use std::{
    fs::{self, OpenOptions},
    io::{self, Read as _, Seek as _, Write as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use daemon::{
    lookup::present,
    state_file::{self, Content, StateFileError, write_json},
};
use dns_policy::epoch::Epoch;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use shared_maps::user::{BOOT_ID, boot_id};

pub(crate) const LOCK_FILE: &str = "agent.lock";
const EPOCH_FILE: &str = "epoch.json";
const VERSION: u32 = 1;
/// Time between two tries to take the lock of a process that ends.
const AGAIN: Duration = Duration::from_millis(10);
/// How often a lock is tried: another process may have it for a moment, to see whether it is taken.
const TRIES: u32 = 5;
/// Mode of the lock file.
const OWNER_ONLY: u32 = 0o600;

/// Why the state directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateDirError {
    /// Another running agent has the lock of the state directory.
    #[error(
        "another agent (pid {pid}) runs on the state directory {dir}; stop it, or give another --state-dir",
        dir = .dir.display()
    )]
    Busy {
        dir: PathBuf,
        /// Its process, as the lock file says.
        pid: String,
    },
    #[error("{path}: {source}; run the agent as root, or give a --state-dir in which it can write", path = .path.display())]
    File { path: PathBuf, source: io::Error },
    /// The file is of a later release.
    #[error(
        "{path} has version {found}; this program reads up to {VERSION}; run the newer release, or remove the file",
        path = .path.display()
    )]
    Newer {
        path: PathBuf,
        /// Version number in the file, larger than `VERSION`.
        found: u32,
    },
}

/// Whether no agent ran on the state directory before, as far as it says.
pub(crate) fn is_new(dir: &Path) -> bool {
    matches!(fs::symlink_metadata(dir.join(EPOCH_FILE)), Err(error) if error.kind() == io::ErrorKind::NotFound)
}

/// Holds the state directory until dropped; a killed process loses it at once.
#[derive(Debug)]
pub(crate) struct StateDirLock {
    dir: PathBuf,
    file: Flock<fs::File>,
}

impl StateDirLock {
    /// Takes the directory, which is created if need be.
    pub(crate) fn take(dir: &Path) -> Result<Self, StateDirError> {
        let path = dir.join(LOCK_FILE);
        let failed = |source| StateDirError::File {
            path: path.clone(),
            source,
        };
        fs::create_dir_all(dir).map_err(failed)?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(OWNER_ONLY)
            .open(&path)
            .map_err(failed)?;
        let mut file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(file) => file,
            Err((mut file, nix::errno::Errno::EWOULDBLOCK)) => {
                let mut pid = String::new();
                let _unreadable = file.read_to_string(&mut pid);
                return Err(StateDirError::Busy {
                    dir: dir.to_owned(),
                    pid: match pid.trim() {
                        "" => "unknown".to_owned(),
                        pid => pid.to_owned(),
                    },
                });
            }
            Err((_, errno)) => return Err(failed(errno.into())),
        };
        let noted = file
            .set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| writeln!(file, "{}", std::process::id()));
        if let Err(error) = noted {
            // The lock is held all the same.
            tracing::warn!(path = %path.display(), %error, "cannot write the process id into the lock file");
        }
        Ok(Self {
            dir: dir.to_owned(),
            file,
        })
    }

    /// Whether another process has the directory. Makes nothing, and writes nothing.
    ///
    /// # Errors
    /// The lock file cannot be looked at.
    pub(crate) fn is_held(dir: &Path) -> Result<bool, StateDirError> {
        let path = dir.join(LOCK_FILE);
        let failed = |source| StateDirError::File {
            path: path.clone(),
            source,
        };
        let Some(file) = present(fs::File::open(&path)).map_err(failed)? else {
            return Ok(false);
        };
        // This takes the lock for a moment. An owner that calls `keep` in this moment finds it taken, so `keep` tries
        // several times.
        match Flock::lock(file, FlockArg::LockSharedNonblock) {
            Ok(_released) => Ok(false),
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(true),
            Err((_, errno)) => Err(failed(errno.into())),
        }
    }

    /// As [`Self::take`]; waits for a process that ends.
    pub(crate) async fn take_within(dir: &Path, limit: Duration) -> Result<Self, StateDirError> {
        let deadline = Instant::now() + limit;
        loop {
            match Self::take(dir) {
                Err(StateDirError::Busy { .. }) if Instant::now() < deadline => {
                    tokio::time::sleep(AGAIN).await;
                }
                taken => return taken,
            }
        }
    }

    /// Makes sure that no other agent can take the directory while this lock is held: if its file was removed or
    /// replaced, takes the lock of the new one too.
    ///
    /// # Errors
    /// [`StateDirError::Busy`]: another process has it. Any other error: the lock cannot be looked at or made, as on a
    /// full disk; the lock that is held stays, and the next call tries again.
    pub(crate) fn keep(&mut self) -> Result<(), StateDirError> {
        let place = |file: fs::Metadata| (file.dev(), file.ino());
        let there = fs::metadata(self.dir.join(LOCK_FILE)).map(place);
        let own = self.file.metadata().map(place);
        if there.is_ok_and(|there| own.is_ok_and(|own| own == there)) {
            return Ok(());
        }
        let mut tries = TRIES;
        loop {
            tries -= 1;
            match Self::take(&self.dir) {
                // An agent that looks whether the directory is in use has the lock for a moment.
                Err(StateDirError::Busy { .. }) if tries > 0 => thread::sleep(AGAIN),
                taken => {
                    *self = taken?;
                    return Ok(());
                }
            }
        }
    }
}

#[derive(Serialize, Deserialize)]
struct EpochFile {
    version: u32,
    boot_id: String,
    start: u64,
}

/// Counts this start in `state`. After a damaged file, or on a full disk, it gets a start
/// number that no lease of this boot can have.
pub fn begin(state: &Path) -> Result<Epoch, StateDirError> {
    begin_noting(state, &mut Vec::new())
}

/// Whether this program can count a start in `state`. Writes nothing.
///
/// # Errors
/// A later release wrote the file, or it cannot be read.
pub(crate) fn check(state: &Path) -> Result<(), StateDirError> {
    let read = state_file::read_versioned::<EpochFile>(&state.join(EPOCH_FILE), VERSION);
    read.map(|_| ()).map_err(unusable)
}

/// As [`begin`]; what is wrong with the file is added to `damaged`.
pub(crate) fn begin_noting(
    state: &Path,
    damaged: &mut Vec<String>,
) -> Result<Epoch, StateDirError> {
    let boot_id = boot_id().map_err(|source| StateDirError::File {
        path: PathBuf::from(BOOT_ID),
        source,
    })?;
    begin_on(state, boot_id, damaged)
}

fn begin_on(
    state: &Path,
    boot_id: String,
    damaged: &mut Vec<String>,
) -> Result<Epoch, StateDirError> {
    let path = state.join(EPOCH_FILE);
    let failed = |source| StateDirError::File {
        path: path.clone(),
        source,
    };
    let read = state_file::read_versioned::<EpochFile>(&path, VERSION);
    let mut start = match read.map_err(unusable)? {
        Content::Absent => 1,
        Content::Found(file) if file.boot_id == boot_id => file.start.saturating_add(1),
        Content::Found(_) => 1,
        Content::Damaged(damage) => {
            let text = format!(
                "{}: the number of starts is lost, and leases of earlier runs end: {}",
                path.display(),
                damage.try_to_set_aside("; set aside as")
            );
            tracing::error!("{text}");
            damaged.push(text);
            shared_maps::user::boottime_ns()
        }
    };
    let file = EpochFile {
        version: VERSION,
        boot_id: boot_id.clone(),
        start,
    };
    match write_json(&path, &file) {
        Err(e) if is_full(&e) => {
            tracing::error!(path = %path.display(), error = %e, "this start cannot be counted on disk, so no new address can be opened; free space in --state-dir");
            start = shared_maps::user::boottime_ns();
        }
        written => written.map_err(failed)?,
    }
    Ok(Epoch { boot_id, start })
}

fn unusable(error: StateFileError) -> StateDirError {
    match error {
        StateFileError::Io { path, source } => StateDirError::File { path, source },
        StateFileError::Newer { path, found, .. } => StateDirError::Newer { path, found },
    }
}

/// Whether the disk, or what its user may have of it, is full.
fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn starts_count_up_within_a_boot_only() {
        let dir = tempfile::tempdir().unwrap();
        let begin = |boot: &str| {
            let begun = begin_on(dir.path(), boot.to_owned(), &mut Vec::new());
            begun.unwrap().start
        };
        assert_eq!(begin("a"), 1);
        assert_eq!(begin("a"), 2);
        assert_eq!(begin("b"), 1);
        fs::write(dir.path().join(EPOCH_FILE), "{").unwrap();
        assert!(begin("b") > 2);
        fs::write(
            dir.path().join(EPOCH_FILE),
            r#"{"version":9,"boot_id":"b","start":1}"#,
        )
        .unwrap();
        let error = begin_on(dir.path(), "b".to_owned(), &mut Vec::new()).unwrap_err();
        assert!(matches!(error, StateDirError::Newer { found: 9, .. }));
    }

    #[test]
    fn a_second_agent_gets_an_error_with_the_owner_of_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        let first = StateDirLock::take(dir.path()).unwrap();
        let mode = fs::metadata(dir.path().join(LOCK_FILE)).unwrap();
        assert_eq!(mode.permissions().mode() & 0o777, OWNER_ONLY);
        let error = StateDirLock::take(dir.path()).unwrap_err().to_string();
        assert!(error.contains(&std::process::id().to_string()), "{error}");
        assert!(error.contains("--state-dir"), "{error}");
        drop(first);
        StateDirLock::take(dir.path()).unwrap();
    }

    #[test]
    fn a_look_at_the_lock_makes_no_file_and_takes_no_lock() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!StateDirLock::is_held(dir.path()).unwrap());
        assert!(!dir.path().join(LOCK_FILE).exists());
        let lock = StateDirLock::take(dir.path()).unwrap();
        assert!(StateDirLock::is_held(dir.path()).unwrap());
        drop(lock);
        let before = fs::read(dir.path().join(LOCK_FILE)).unwrap();
        assert!(!StateDirLock::is_held(dir.path()).unwrap());
        assert_eq!(fs::read(dir.path().join(LOCK_FILE)).unwrap(), before);
        StateDirLock::take(dir.path()).unwrap();
    }

    #[test]
    fn a_lock_whose_file_went_is_taken_again_and_one_that_cannot_be_made_is_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let mut lock = StateDirLock::take(&state).unwrap();
        fs::remove_file(state.join(LOCK_FILE)).unwrap();
        lock.keep().unwrap();
        StateDirLock::take(&state).unwrap_err();
        // A file is in the place of the directory, as on a file system that cannot be written.
        fs::remove_dir_all(&state).unwrap();
        fs::write(&state, "").unwrap();
        let error = lock.keep().unwrap_err();
        assert!(matches!(error, StateDirError::File { .. }), "{error}");
        fs::remove_file(&state).unwrap();
        lock.keep().unwrap();
        // Another agent was faster.
        fs::remove_file(state.join(LOCK_FILE)).unwrap();
        let _other = StateDirLock::take(&state).unwrap();
        let error = lock.keep().unwrap_err();
        assert!(matches!(error, StateDirError::Busy { .. }), "{error}");
    }
}
