//! Entering a network namespace by its file.

use std::{fs::File, io};

use daemon::regular_file::{self, FileError};
use nix::{
    sched::{CloneFlags, setns},
    sys::statfs::{NSFS_MAGIC, fstatfs},
};

use super::{DiscoverError, Netns};

/// Moves the calling thread into a namespace.
pub(super) fn enter_netns(netns: &Netns) -> Result<(), DiscoverError> {
    let file = open_netns(netns)?;
    setns(file, CloneFlags::CLONE_NEWNET).map_err(|errno| DiscoverError::Enter {
        netns: netns.clone(),
        source: errno.into(),
    })
}

/// Opens the file of a namespace. Another kind of file is not opened, or is not waited for: the caller
/// may be of a container runtime that names any path.
pub(super) fn open_netns(netns: &Netns) -> Result<File, DiscoverError> {
    let enter = |source| DiscoverError::Enter {
        netns: netns.clone(),
        source,
    };
    let not_netns = |found: String| DiscoverError::NotNetns {
        netns: netns.clone(),
        found,
    };
    let file = regular_file::open(&netns.path()).map_err(|error| match error {
        FileError::Io(source) if source.kind() == io::ErrorKind::NotFound => {
            DiscoverError::NoNetns(netns.clone())
        }
        FileError::Io(source) if source.kind() == io::ErrorKind::InvalidInput => {
            not_netns(source.to_string())
        }
        FileError::Io(source) => enter(source),
        other => not_netns(other.to_string()),
    })?;
    let system = fstatfs(&file).map_err(|errno| enter(errno.into()))?;
    match system.filesystem_type() {
        NSFS_MAGIC => Ok(file),
        _ => Err(not_netns("is an ordinary file".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use nix::{sys::stat::Mode, unistd::mkfifo};

    use super::*;

    #[test]
    fn only_a_network_namespace_is_opened() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| Netns::Path(dir.path().join(name));
        mkfifo(&dir.path().join("pipe"), Mode::S_IRWXU).unwrap();
        std::fs::write(dir.path().join("file"), "text").unwrap();
        for name in ["pipe", "file", ".", "no\0path"] {
            let error = open_netns(&at(name)).unwrap_err();
            assert!(matches!(error, DiscoverError::NotNetns { .. }), "{error}");
        }
        let absent = open_netns(&at("absent")).unwrap_err();
        assert!(matches!(absent, DiscoverError::NoNetns(_)), "{absent}");
        open_netns(&Netns::Path("/proc/self/ns/net".into())).unwrap();
    }
}
