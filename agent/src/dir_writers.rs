//! Who may write into a directory of the agent, besides root and the agent's own user: such a user
//! decides what the agent does with the files there.

use std::{
    fs::{self, Metadata},
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

/// Permission of users that are neither the owner nor in the group.
const OTHERS_WRITE: u32 = 0o002;
/// Write permission of the group.
const GROUP_WRITES: u32 = 0o020;
/// Only the owner of a file may rename or remove it.
const STICKY: u32 = 0o1000;

/// A directory that a flag names.
#[derive(Clone, Debug)]
pub struct OwnDirectory {
    /// Name of the flag, with the leading dashes.
    pub flag: &'static str,
    pub path: PathBuf,
    /// A group that may write there.
    pub group: Option<u32>,
    /// What a user who writes there can do.
    pub effect: &'static str,
}

impl OwnDirectory {
    /// Why others may write there, with the remedy. `None` if no other user may, or if the directory cannot be looked
    /// at: the source that reads it reports that.
    pub(crate) fn problem(&self) -> Option<String> {
        let path = &self.path;
        let there = fs::metadata(path).ok()?;
        let own = foreign_writer(&there, self.group);
        let parent = || {
            let path = fs::canonicalize(path).ok()?;
            let why = foreign_parent(&path).ok()??;
            Some(format!("{}: {why}", path.parent()?.display()))
        };
        let why = match own {
            Some(why) => format!("{}: {why}", path.display()),
            None => parent()?,
        };
        Some(format!(
            "{} {why}; who writes there {}",
            self.flag, self.effect
        ))
    }
}

/// Why another user may write into a directory, with the remedy. Members of `group` may write there.
pub(crate) fn foreign_writer(there: &Metadata, group: Option<u32>) -> Option<&'static str> {
    let own = nix::unistd::geteuid().as_raw();
    let mode = there.mode();
    match () {
        () if there.uid() != 0 && there.uid() != own => {
            Some("it belongs to another user: give it to root (chown root)")
        }
        () if mode & OTHERS_WRITE != 0 => {
            Some("every user may write into it: forbid that (chmod o-w)")
        }
        () if mode & GROUP_WRITES != 0 && group != Some(there.gid()) => {
            Some("its group may write into it: forbid that (chmod g-w)")
        }
        () => None,
    }
}

/// Why another user may put another directory in the place of this one, with the remedy.
pub(crate) fn foreign_parent(dir: &Path) -> io::Result<Option<&'static str>> {
    let Some(parent) = dir.parent().filter(|parent| !parent.as_os_str().is_empty()) else {
        return Ok(None);
    };
    let there = fs::metadata(parent)?;
    let is_sticky = there.mode() & STICKY != 0 && there.uid() == 0;
    Ok(foreign_writer(&there, None).filter(|_| !is_sticky))
}

#[cfg(test)]
mod tests {
    use std::{fs::Permissions, os::unix::fs::PermissionsExt as _};

    use super::*;

    #[test]
    fn a_directory_is_a_problem_if_others_may_write_into_it_or_replace_it() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("policies");
        fs::create_dir(&path).unwrap();
        let set = |path: &Path, mode: u32| {
            fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        };
        let directory = OwnDirectory {
            flag: "--policy-dir",
            path: path.clone(),
            group: None,
            effect: "decides policy",
        };
        set(root.path(), 0o755);
        for (mode, wanted) in [
            (0o755, None),
            (0o700, None),
            (0o775, Some("its group may write into it")),
            (0o777, Some("every user may write into it")),
            // Others could add a policy, although they could not remove one.
            (0o1777, Some("every user may write into it")),
        ] {
            set(&path, mode);
            let problem = directory.problem();
            assert_eq!(problem.is_some(), wanted.is_some(), "{mode:o}: {problem:?}");
            if let Some(wanted) = wanted {
                let problem = problem.unwrap();
                assert!(problem.starts_with("--policy-dir /"), "{problem}");
                assert!(problem.contains(wanted), "{problem}");
                assert!(problem.contains("chmod"), "{problem}");
            }
        }
        set(&path, 0o755);
        set(root.path(), 0o777);
        let problem = directory.problem().unwrap();
        assert!(
            problem.contains(&format!("{}: every", root.path().display())),
            "{problem}"
        );
        set(root.path(), 0o755);
        set(&path, 0o775);
        let gid = fs::metadata(&path).unwrap().gid();
        let of_group = OwnDirectory {
            group: Some(gid),
            ..directory.clone()
        };
        assert_eq!(of_group.problem(), None);
        if nix::unistd::geteuid().is_root() {
            set(&path, 0o755);
            std::os::unix::fs::chown(&path, Some(65_534), None).unwrap();
            let problem = directory.problem().unwrap();
            assert!(problem.contains("chown root"), "{problem}");
        }
        fs::remove_dir(&path).unwrap();
        assert_eq!(directory.problem(), None);
    }
}
