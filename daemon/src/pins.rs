//! Directories of the BPF file system: made, checked, locked.
//!
//! The root of a BPF file system may be writable by everyone (mode 1777), so that another user
//! could make our directories first and put other objects into them. Every directory below it is
//! opened without following links and must belong to this process's user or to root. Directories
//! also serve as locks, because a BPF file system has no ordinary files. A lock belongs to the
//! inode, so it also works between mount namespaces. Only a user who may open the directory can
//! take it.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt as _,
    path::{Component, Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg, OFlag, openat},
    sys::stat::{Mode, fchmod, mkdirat},
    unistd::{Gid, Uid, fchown},
};

const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Write permission of group and others.
const OTHERS_WRITE: u32 = 0o022;
const STICKY: u32 = 0o1000;

/// Users that may open a directory of [`make`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MayOpen {
    /// Everyone. An existing directory keeps its mode.
    Everyone,
    /// Only the owner (mode 0700).
    Owner,
    /// The owner, and this group.
    Group(u32),
}

/// Why a directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PinDirError {
    /// A system call on the directory failed.
    #[error("{path}: {source}", path = .path.display())]
    Io {
        /// The directory that the call was about.
        path: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
    /// Another user made it, or can change it.
    #[error(
        "{path} (owner: uid {uid}, mode {mode:o}) can be changed by other users than root: look \
         what is in it, remove it, and start again; `mount -o remount,mode=0755 /sys/fs/bpf` \
         keeps others from making directories there",
        path = .path.display()
    )]
    Foreign {
        /// The directory that other users can change.
        path: PathBuf,
        /// Uid of the directory's owner.
        uid: u32,
        /// Permission bits of the directory.
        mode: u32,
    },
}

/// Opens the directory `below` in `root`, and makes its missing parts.
pub fn make(root: &Path, below: &str, may_open: MayOpen) -> Result<File, PinDirError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source: io::Error| PinDirError::Io { path, source }
    };
    fs::create_dir_all(root).map_err(failed(root))?;
    let mut at = File::open(root).map_err(failed(root))?;
    let mut path = root.to_owned();
    check(&at, &path)?;
    for part in Path::new(below).components() {
        let Component::Normal(part) = part else {
            continue;
        };
        path.push(part);
        match mkdirat(&at, part, Mode::from_bits_truncate(0o755)) {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(errno) => return Err(failed(&path)(errno.into())),
        }
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let opened = openat(&at, part, flags, Mode::empty());
        at = File::from(opened.map_err(|errno| failed(&path)(errno.into()))?);
        check(&at, &path)?;
    }
    open_to(&at, may_open).map_err(|errno| failed(&path)(errno.into()))?;
    Ok(at)
}

/// Opens a directory that an agent or a proxy made as root.
pub fn open(root: &Path, below: &str) -> Result<File, PinDirError> {
    let path = root.join(below);
    match File::open(&path) {
        Ok(dir) => check(&dir, &path).map(|()| dir),
        Err(source) => Err(PinDirError::Io { path, source }),
    }
}

/// Refuses a directory in which another user can make, rename or remove things. A sticky directory
/// (usually the root itself) is accepted: in it, users can rename or remove only their own files.
fn check(dir: &File, path: &Path) -> Result<(), PinDirError> {
    let found = dir.metadata().map_err(|source| PinDirError::Io {
        path: path.to_owned(),
        source,
    })?;
    let (uid, mode) = (found.uid(), found.mode() & 0o7777);
    let owned = uid == 0 || uid == Uid::effective().as_raw();
    if owned && (mode & OTHERS_WRITE == 0 || mode & STICKY != 0) {
        return Ok(());
    }
    Err(PinDirError::Foreign {
        path: path.to_owned(),
        uid,
        mode,
    })
}

fn open_to(dir: &File, may_open: MayOpen) -> nix::Result<()> {
    let (group, mode) = match may_open {
        MayOpen::Everyone => return Ok(()),
        MayOpen::Owner => (None, 0o700),
        MayOpen::Group(group) => (Some(Gid::from_raw(group)), 0o750),
    };
    // First remove all access for others, so that no process opens it with the previous group.
    fchmod(dir, Mode::S_IRWXU)?;
    if group.is_some() {
        fchown(dir, None, group)?;
    }
    fchmod(dir, Mode::from_bits_truncate(mode))
}

/// Locks an opened directory. Returns `None` if another process still held the lock after `limit`.
pub fn lock(mut dir: File, limit: Duration) -> io::Result<Option<Flock<File>>> {
    let deadline = Instant::now() + limit;
    loop {
        dir = match Flock::lock(dir, FlockArg::LockExclusiveNonblock) {
            Ok(locked) => return Ok(Some(locked)),
            Err((dir, Errno::EWOULDBLOCK | Errno::EINTR)) => dir,
            Err((_, errno)) => return Err(errno.into()),
        };
        if Instant::now() >= deadline {
            return Ok(None);
        }
        sleep(POLL_INTERVAL);
    }
}

/// Locks an opened directory as soon as no other process has it locked. Blocks this thread.
pub fn wait(mut dir: File) -> io::Result<Flock<File>> {
    loop {
        dir = match Flock::lock(dir, FlockArg::LockExclusive) {
            Ok(locked) => return Ok(locked),
            Err((dir, Errno::EINTR)) => dir,
            Err((_, errno)) => return Err(errno.into()),
        };
    }
}

/// Process that holds a lock on this file or directory, if this process can see it.
pub fn holder(file: &File) -> Option<u32> {
    let found = file.metadata().ok()?;
    let (major, minor) = (
        nix::sys::stat::major(found.dev()),
        nix::sys::stat::minor(found.dev()),
    );
    let place = format!("{major:02x}:{minor:02x}:{}", found.ino());
    let locks = fs::read_to_string("/proc/locks").ok()?;
    holder_in(&locks, &place)
}

/// The process that locks the inode `place`. The lines of `locks` are like
/// `1: FLOCK  ADVISORY  WRITE 4711 00:2a:17 0 EOF`.
fn holder_in(locks: &str, place: &str) -> Option<u32> {
    let mut held = locks.lines().filter_map(|line| {
        let mut words = line.split_ascii_whitespace().skip(1);
        (words.next()? == "FLOCK").then_some(())?;
        let pid = words.nth(2)?;
        (words.next()? == place).then(|| pid.parse().ok())?
    });
    held.find(|pid| *pid != 0)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_directory_that_others_can_change_is_refused_with_the_remedy() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("holdfast")).unwrap();
        set_mode(&root.path().join("holdfast"), 0o777);
        let error = make(root.path(), "holdfast/locks", MayOpen::Owner).unwrap_err();
        assert!(matches!(error, PinDirError::Foreign { mode: 0o777, .. }));
        let text = error.to_string();
        assert!(
            text.contains("holdfast") && text.contains("remove it"),
            "{text}"
        );
    }

    #[test]
    fn a_link_in_place_of_a_directory_is_not_followed() {
        let root = tempfile::tempdir().unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(elsewhere.path(), root.path().join("holdfast")).unwrap();
        make(root.path(), "holdfast/locks", MayOpen::Owner).unwrap_err();
        assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_root_that_everyone_may_write_is_used_if_it_is_sticky() {
        let root = tempfile::tempdir().unwrap();
        set_mode(root.path(), 0o1777);
        make(root.path(), "a/b", MayOpen::Everyone).unwrap();
        set_mode(root.path(), 0o777);
        make(root.path(), "a/b", MayOpen::Everyone).unwrap_err();
    }

    #[test]
    fn a_lock_is_waited_for_up_to_the_limit_and_its_holder_is_named() {
        let root = tempfile::tempdir().unwrap();
        let open = || make(root.path(), "lock", MayOpen::Owner).unwrap();
        let mode = fs::metadata(root.path().join("lock")).map(|m| m.mode() & 0o777);
        assert!(mode.is_err());
        let held = lock(open(), Duration::ZERO).unwrap().unwrap();
        let mode = fs::metadata(root.path().join("lock")).unwrap().mode() & 0o777;
        assert_eq!(mode, 0o700);
        assert!(lock(open(), Duration::ZERO).unwrap().is_none());
        assert_eq!(holder(&open()), Some(std::process::id()));
        drop(held);
        assert!(lock(open(), Duration::ZERO).unwrap().is_some());
    }

    #[test]
    fn the_holder_is_read_from_the_kernels_list() {
        let list = "1: POSIX  ADVISORY  WRITE 7 00:2a:17 0 EOF\n\
                    2: FLOCK  ADVISORY  WRITE 8 00:2a:18 0 EOF\n\
                    2: -> FLOCK  ADVISORY  WRITE 10 00:2a:17 0 EOF\n\
                    3: FLOCK  ADVISORY  WRITE 9 00:2a:17 0 EOF\n";
        assert_eq!(holder_in(list, "00:2a:17"), Some(9));
        assert_eq!(holder_in(list, "00:2a:19"), None);
    }
}
