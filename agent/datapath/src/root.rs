//! The BPF root: its directories, and the lock of the one agent that owns them.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use daemon::pins::{self, MayOpen, PinDirError};
use nix::{
    fcntl::Flock,
    sys::statfs::{BPF_FS_MAGIC, statfs},
};
use shared_maps::pin;

/// Why the BPF root cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RootError {
    /// The directory is not in a BPF file system.
    #[error("{path} is not on a BPF file system: run `mount -t bpf bpf {path}` or set --bpf-root", path = .0.display())]
    NotBpffs(PathBuf),
    /// A directory cannot be made, or root does not own it.
    #[error(transparent)]
    Directory(#[from] PinDirError),
    /// The lock cannot be taken.
    #[error("locking {path}: {source}", path = .path.display())]
    Lock { path: PathBuf, source: io::Error },
    /// Another running agent owns the BPF root.
    #[error(
        "another agent (pid {pid}) runs on the BPF root {root} and owns its maps and programs; \
         stop that agent, or give this one a --bpf-root and a --state-dir of its own \
         (for example --bpf-root {root}/second)",
        root = .root.display()
    )]
    Busy {
        root: PathBuf,
        /// Process id of the other agent, or `unknown`.
        pid: String,
    },
}

/// Owns the BPF root until dropped; a killed process loses it at once.
///
/// The lock lies on a directory that only root may open, so no other user can take it. Agents in
/// other mount namespaces that see the same BPF file system meet at this lock. Another BPF file system
/// has other pins: nothing there is this agent's.
#[derive(Debug)]
pub struct BpfRootLock {
    root: PathBuf,
    dir: Flock<File>,
}

impl BpfRootLock {
    /// Takes the root. Makes its directories if they are missing.
    pub fn take(root: &Path) -> Result<Self, RootError> {
        match Self::try_take(root)? {
            Ok(lock) => Ok(lock),
            Err(holder) => Err(busy(root, pins::holder(&holder))),
        }
    }

    /// Takes the root if no other agent owns it.
    ///
    /// # Errors
    /// The root cannot be used.
    pub fn take_if_free(root: &Path) -> Result<Option<Self>, RootError> {
        Ok(Self::try_take(root)?.ok())
    }

    /// Waits until no other agent owns the root. Blocks this thread for as long as that takes.
    pub fn wait(root: &Path) -> Result<Self, RootError> {
        make_dirs(root)?;
        loop {
            let dir = pins::make(root, pin::AGENT_LOCK, MayOpen::Owner)?;
            let lock = Self {
                root: root.to_owned(),
                dir: pins::wait(dir).map_err(failed_at(root))?,
            };
            // If the directory was replaced in the meantime, other agents lock the new one.
            if lock.is_in_place() {
                return Ok(lock);
            }
        }
    }

    /// Process that owns the root; `None` if no process does, or if this namespace does not show it.
    ///
    /// # Errors
    /// The lock cannot be inspected.
    pub fn holder(root: &Path) -> Result<Option<u32>, RootError> {
        let dir = pins::make(root, pin::AGENT_LOCK, MayOpen::Owner)?;
        Ok(pins::holder(&dir))
    }

    /// Makes sure that no other agent can take the root while this lock is held: if its directory was removed or
    /// replaced, takes the lock of the new one too.
    ///
    /// # Errors
    /// Another agent has taken the root, or its lock cannot be inspected.
    pub fn keep(&mut self) -> Result<(), RootError> {
        if self.is_in_place() {
            return Ok(());
        }
        *self = Self::take(&self.root)?;
        Ok(())
    }

    fn is_in_place(&self) -> bool {
        let place = |file: fs::Metadata| (file.dev(), file.ino());
        let there = fs::metadata(self.root.join(pin::AGENT_LOCK)).map(place);
        let own = self.dir.metadata().map(place);
        there.is_ok_and(|there| own.is_ok_and(|own| own == there))
    }

    /// The lock, or the directory that another process has locked.
    fn try_take(root: &Path) -> Result<Result<Self, File>, RootError> {
        make_dirs(root)?;
        let dir = pins::make(root, pin::AGENT_LOCK, MayOpen::Owner)?;
        let holder = dir.try_clone().map_err(failed_at(root))?;
        let locked = pins::lock(dir, Duration::ZERO).map_err(failed_at(root))?;
        Ok(locked
            .map(|dir| Self {
                root: root.to_owned(),
                dir,
            })
            .ok_or(holder))
    }
}

fn failed_at(root: &Path) -> impl Fn(io::Error) -> RootError {
    let path = root.join(pin::AGENT_LOCK);
    move |source| RootError::Lock {
        path: path.clone(),
        source,
    }
}

/// Makes the directories of maps and links.
pub(crate) fn make_dirs(root: &Path) -> Result<(), RootError> {
    let on_bpffs = root
        .ancestors()
        .find_map(|path| statfs(path).ok())
        .is_some_and(|info| info.filesystem_type() == BPF_FS_MAGIC);
    if !on_bpffs {
        return Err(RootError::NotBpffs(root.to_owned()));
    }
    for dir in [pin::GLOBALS, pin::LINKS] {
        pins::make(root, dir, MayOpen::Everyone)?;
    }
    Ok(())
}

fn busy(root: &Path, pid: Option<u32>) -> RootError {
    RootError::Busy {
        root: root.to_owned(),
        pid: pid.map_or_else(|| "unknown".to_owned(), |pid| pid.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_outside_of_bpffs_is_refused_with_the_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let error = BpfRootLock::take(dir.path()).unwrap_err();
        assert!(error.to_string().contains("mount -t bpf"), "{error}");
    }

    #[test]
    fn a_busy_root_names_the_process_and_both_ways_out() {
        let text = busy(Path::new("/sys/fs/bpf"), Some(4711)).to_string();
        for part in ["pid 4711", "stop that agent", "--bpf-root", "--state-dir"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
