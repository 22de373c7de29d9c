//! Making directories and giving them to a user, by descriptor.
//!
//! Root does this for a user who may have been compromised in an earlier run. So no path is looked
//! up twice, and nothing is followed or changed below a directory that another user owns: that user
//! could put a link to one of root's files in its place.

use std::{
    collections::VecDeque,
    ffi::{OsStr, OsString},
    fs::{self, File},
    io,
    os::{
        fd::{AsFd as _, AsRawFd as _},
        unix::fs::{MetadataExt as _, PermissionsExt as _},
    },
    path::{Component, Path},
};

use nix::{
    errno::Errno,
    fcntl::{AtFlags, OFlag, openat, readlinkat},
    sys::stat::{Mode, SFlag, fstat, mkdirat},
    unistd::{Gid, Uid, fchownat},
};

/// Maximum number of links on the way to a directory.
const MAX_LINKS: usize = 16;

/// Makes the directory if it is missing: only its owner and its group may enter. If an owner is
/// given, the directory becomes theirs.
pub(super) fn prepare(path: &Path, owner: Option<(Uid, Gid)>) -> io::Result<()> {
    let Some((user, group)) = owner else {
        return walk(path, &Trust::Anyone).map(drop);
    };
    let is_his = |dir: &File| {
        let found = dir.metadata()?;
        io::Result::Ok(found.uid() == user.as_raw() && found.gid() == group.as_raw())
    };
    // A directory that already belongs to the owner is not changed, so its path needs no trust.
    if path.is_dir() && is_his(&walk(path, &Trust::Anyone)?)? {
        return Ok(());
    }
    let dir = walk(path, &Trust::Own)?;
    fchownat(
        dir.as_fd(),
        "",
        Some(user),
        Some(group),
        AtFlags::AT_EMPTY_PATH,
    )?;
    Ok(())
}

/// Owners that are allowed for directories on the path.
enum Trust {
    Anyone,
    /// Only root and the user of this process.
    Own,
}

/// Opens a directory part by part, and makes missing parts.
fn walk(path: &Path, trust: &Trust) -> io::Result<File> {
    let path = std::path::absolute(path)?;
    let mut at = File::open("/")?;
    let mut parts = parts(&path);
    let mut links = 0;
    while let Some(part) = parts.pop_front() {
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let open = || openat(&at, part.as_os_str(), flags, Mode::empty());
        let next = match open() {
            Err(Errno::ENOENT) => {
                let mode = if parts.is_empty() { 0o750 } else { 0o755 };
                match mkdirat(&at, part.as_os_str(), Mode::from_bits_truncate(mode)) {
                    Ok(()) => {
                        let made = open()?;
                        let by_descriptor = format!("/proc/self/fd/{}", made.as_raw_fd());
                        // The mode must not depend on the umask.
                        fs::set_permissions(by_descriptor, fs::Permissions::from_mode(mode))?;
                        made
                    }
                    Err(Errno::EEXIST) => open()?,
                    Err(errno) => return Err(errno.into()),
                }
            }
            opened => opened?,
        };
        let found = fstat(&next)?;
        let owned = matches!(trust, Trust::Anyone)
            || found.st_uid == 0
            || found.st_uid == Uid::effective().as_raw();
        let kind = SFlag::from_bits_truncate(found.st_mode & SFlag::S_IFMT.bits());
        if kind == SFlag::S_IFLNK {
            links += 1;
            if !owned || links > MAX_LINKS {
                return Err(refused(&path, &part, found.st_uid));
            }
            let target = readlinkat(&next, "")?;
            let target = Path::new(&target);
            if target.is_absolute() {
                at = File::open("/")?;
            }
            let mut rest = self::parts(target);
            rest.append(&mut parts);
            parts = rest;
            continue;
        }
        if !owned && !parts.is_empty() {
            return Err(refused(&path, &part, found.st_uid));
        }
        at = File::from(next);
    }
    Ok(at)
}

fn parts(path: &Path) -> VecDeque<OsString> {
    let parts = path.components().filter_map(|part| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some(OsString::from("..")),
        _ => None,
    });
    parts.collect()
}

fn refused(path: &Path, part: &OsStr, uid: u32) -> io::Error {
    io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!(
            "{} on the way to {} belongs to uid {uid}, who could exchange what is below it: \
             choose a directory whose parents are root's",
            part.display(),
            path.display()
        ),
    )
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    fn own() -> Option<(Uid, Gid)> {
        Some((Uid::effective(), Gid::effective()))
    }

    #[test]
    fn directories_are_made_and_links_of_ones_own_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (real, link) = (dir.path().join("real"), dir.path().join("link"));
        fs::create_dir(&real).unwrap();
        symlink("real", &link).unwrap();
        prepare(&link.join("a/b"), own()).unwrap();
        assert_eq!(
            fs::metadata(real.join("a/b")).unwrap().mode() & 0o777,
            0o750
        );
        prepare(&link.join("a/b"), own()).unwrap();
        prepare(&dir.path().join("c/../d"), None).unwrap();
        assert!(dir.path().join("d").is_dir());
    }

    #[test]
    fn links_in_a_circle_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        symlink("two", dir.path().join("one")).unwrap();
        symlink("one", dir.path().join("two")).unwrap();
        prepare(&dir.path().join("one/x"), own()).unwrap_err();
    }
}
