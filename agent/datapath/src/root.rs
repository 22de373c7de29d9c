//! The BPF root: its directories, and the lock of the one agent that owns them.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use daemon::pins::{self, MayOpen, PinDirError};
use nix::{
    fcntl::Flock,
    sys::statfs::{BPF_FS_MAGIC, statfs},
};
use shared_maps::{
    pin,
    user::{Access, Globals},
};

/// Beginning of the agent's process name.
const AGENT: &str = "holdfast-agent";

/// Why the BPF root cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RootError {
    /// No BPF file system there.
    #[error("{path} is not on a BPF file system: run `mount -t bpf bpf {path}` or set --bpf-root", path = .0.display())]
    NotBpffs(PathBuf),
    /// A directory cannot be made or is not root's.
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
/// other mount namespaces that see the same BPF file system meet in it. Another BPF file system
/// has other pins: nothing there is this agent's.
#[derive(Debug)]
pub struct BpfRootLock {
    _dir: Flock<File>,
}

impl BpfRootLock {
    /// Takes the root, whose directories are made if need be.
    pub fn take(root: &Path) -> Result<Self, RootError> {
        make_dirs(root)?;
        let dir = pins::make(root, pin::AGENT_LOCK, MayOpen::Owner)?;
        let path = root.join(pin::AGENT_LOCK);
        let failed = |source| RootError::Lock {
            path: path.clone(),
            source,
        };
        let holder = dir.try_clone().map_err(failed)?;
        let Some(dir) = pins::lock(dir, Duration::ZERO).map_err(failed)? else {
            return Err(busy(root, pins::holder(&holder)));
        };
        match writer_without_lock(root) {
            Some(pid) => Err(busy(root, Some(pid))),
            None => Ok(Self { _dir: dir }),
        }
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

/// An agent of a release that did not lock the BPF root: it holds `cilium_lxc` open for writing,
/// which clients and proxies do not.
fn writer_without_lock(root: &Path) -> Option<u32> {
    let map = Globals::new(root).lxc(Access::ReadOnly).ok()?;
    let agents = fs::read_dir("/proc").ok()?.flatten().filter_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let name = fs::read_to_string(entry.path().join("comm")).ok()?;
        (pid != std::process::id() && name.starts_with(AGENT)).then_some(pid)
    });
    agents.into_iter().find(|pid| writes(*pid, map.id()))
}

/// Whether a process has a descriptor of this map for writing.
fn writes(pid: u32, map: u32) -> bool {
    let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fdinfo")) else {
        return false;
    };
    let mut infos = descriptors
        .flatten()
        .filter_map(|entry| fs::read_to_string(entry.path()).ok());
    infos.any(|info| is_writer(&info, map))
}

/// Reads `fdinfo` of proc(5): `flags` in octal, and of a BPF map its `map_id`.
fn is_writer(info: &str, map: u32) -> bool {
    let field = |name: &str| {
        let mut lines = info.lines();
        lines.find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()))
    };
    let is_map = field("map_id:").is_some_and(|id| id == map.to_string());
    let flags = field("flags:").and_then(|flags| u32::from_str_radix(&flags, 8).ok());
    // The access mode: 0 is reading alone.
    is_map && flags.is_some_and(|flags| flags & 0o3 != 0)
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
    fn the_writers_of_a_map_are_read_from_its_descriptors() {
        let info = "pos:\t0\nflags:\t02000002\nmnt_id:\t16\nino:\t5\nmap_type:\t1\nmap_id:\t77\n";
        assert!(is_writer(info, 77));
        assert!(!is_writer(info, 7));
        assert!(!is_writer(&info.replace("02000002", "02000000"), 77));
        assert!(!is_writer("pos:\t0\nflags:\t02000002\n", 77));
    }

    #[test]
    fn a_busy_root_names_the_process_and_both_ways_out() {
        let text = busy(Path::new("/sys/fs/bpf"), Some(4711)).to_string();
        for part in ["pid 4711", "stop that agent", "--bpf-root", "--state-dir"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
