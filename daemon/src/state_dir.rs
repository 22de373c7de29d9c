//! Whether two programs have the same state directory: containers may have it at different paths.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

/// The state directory of one program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StateDir {
    /// Path in that program's file system.
    pub path: PathBuf,
    /// Device and inode; `None` if there is no such directory, or it cannot be looked at.
    pub inode: Option<(u64, u64)>,
}

impl StateDir {
    /// Looks at the directory as it is now.
    pub fn look(path: &Path) -> Self {
        let found = fs::metadata(path).ok();
        Self {
            path: path.to_owned(),
            inode: found.map(|found| (found.dev(), found.ino())),
        }
    }

    /// Whether `other` is another directory. A directory without a path is unknown, and does not
    /// count as another one.
    pub fn differs_from(&self, other: &Self) -> bool {
        let is_known = |dir: &Self| !dir.path.as_os_str().is_empty();
        if !is_known(self) || !is_known(other) {
            return false;
        }
        match (self.inode, other.inode) {
            (Some(own), Some(others)) => own != others,
            (None, None) => self.path != other.path,
            (Some(_), None) | (None, Some(_)) => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_are_compared_by_inode_and_unknown_ones_never_differ() {
        let dir = tempfile::tempdir().unwrap();
        let one = StateDir::look(dir.path());
        let alias = dir.path().join("..").join(dir.path().file_name().unwrap());
        assert!(!one.differs_from(&StateDir::look(&alias)));
        let sub = dir.path().join("sub");
        let absent = StateDir::look(&sub);
        assert!(one.differs_from(&absent) && absent.differs_from(&one));
        assert!(!absent.differs_from(&StateDir::look(&sub)));
        fs::create_dir(&sub).unwrap();
        assert!(one.differs_from(&StateDir::look(&sub)));
        let unknown = StateDir::default();
        assert!(!one.differs_from(&unknown) && !unknown.differs_from(&absent));
    }
}
