//! Which directory documents were read from. A directory that was unmounted, or that was not mounted
//! yet when the agent started, has no files: that does not show that its documents were removed.
//!
//! A listing without documents counts only if the directory is the one that had them. The agent stores which
//! directory that was, so that this holds across a restart.

use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use daemon::{
    lookup::Lookup,
    state_file::{read_or_set_aside, write_json},
};
use serde::{Deserialize, Serialize};

use crate::watched_dir;

/// Why a directory cannot be listed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListError {
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    /// The directory is another one than before, and has no documents.
    #[error(
        "is another directory than the one that was read before, and has no documents: its file system \
         may not be mounted"
    )]
    Emptied,
}

impl ListError {
    /// What to do about `dir`.
    pub(crate) fn remedy(&self, dir: &Path) -> String {
        match self {
            Self::Io(_) => "make it readable; what was read before stays in force".to_owned(),
            Self::Emptied => format!(
                "mount it; what was read before stays in force; if that is to go, put a file without \
                 documents there: `echo --- > {}`",
                dir.join("none.yaml").display()
            ),
        }
    }
}

/// Device and inode of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    fn of(dir: &Path) -> io::Result<Self> {
        let metadata = fs::metadata(dir)?;
        Ok(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
        })
    }
}

/// Content of the file that stores which directory was read.
#[derive(Serialize, Deserialize)]
struct Content {
    directory: PathBuf,
    #[serde(flatten)]
    identity: Identity,
}

/// A directory of documents, with the identity that it had at the last listing.
#[derive(Debug)]
pub(crate) struct DocumentDir {
    dir: PathBuf,
    /// Where its identity is stored; `None` = nowhere.
    file: Option<PathBuf>,
    /// Identity of the directory that was read last; `None` = unknown.
    known: Option<Identity>,
    is_stored: bool,
}

impl DocumentDir {
    /// Documents of `dir`; nothing is kept across a restart.
    pub(crate) fn new(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
            file: None,
            known: None,
            is_stored: false,
        }
    }

    /// Documents of `dir`, with the identity that an earlier run stored in `file`. An unusable file is set aside and
    /// added to `damaged`; the next listing writes the file again.
    pub(crate) fn stored(dir: &Path, file: PathBuf, damaged: &mut Vec<String>) -> Self {
        let read = read_or_set_aside(&file, |bytes| serde_json::from_slice::<Content>(bytes));
        let known = read.unwrap_or_else(|why| {
            let text = format!(
                "{}: which directory the documents were in: {why}; at this start an empty \
                 directory counts as one whose documents were removed",
                file.display(),
            );
            tracing::error!("{text}");
            damaged.push(text);
            None
        });
        let known = known.filter(|content| content.directory == dir);
        Self {
            dir: dir.to_owned(),
            file: Some(file),
            is_stored: known.is_some(),
            known: known.map(|content| content.identity),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.dir
    }

    /// Names of the document files. `has_documents`: documents were read before, by this run or by the
    /// last one.
    pub(crate) fn list(&mut self, has_documents: bool) -> Result<BTreeSet<String>, ListError> {
        let before = Identity::of(&self.dir)?;
        let names = watched_dir::names(&self.dir)?;
        let now = Identity::of(&self.dir)?;
        let is_another = now != before || self.known.is_some_and(|known| known != now);
        if names.is_empty() && is_another && has_documents {
            return Err(ListError::Emptied);
        }
        self.note(now);
        Ok(names)
    }

    /// Looks for a file that a listing lacks. A listing alone does not show that the file does not exist.
    pub(crate) fn look(&self, name: &str) -> Lookup<()> {
        let path = self.dir.join(name);
        Lookup::of_path(fs::symlink_metadata(path)).map(|_| ())
    }

    fn note(&mut self, now: Identity) {
        let is_new = self.known.replace(now) != Some(now);
        let Some(file) = &self.file else {
            return;
        };
        if !is_new && self.is_stored {
            return;
        }
        let content = Content {
            directory: self.dir.clone(),
            identity: now,
        };
        let written = write_json(file, &content);
        // The first failure is logged; the next listing tries again.
        if let Err(error) = &written
            && (is_new || self.is_stored)
        {
            tracing::warn!(file = %file.display(), %error, "cannot store which directory the documents are in");
        }
        self.is_stored = written.is_ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_directory_in_the_place_of_another_one_removes_nothing() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("documents");
        let file = root.path().join("record.json");
        let open = || {
            let mut damaged = Vec::new();
            let documents = DocumentDir::stored(&dir, file.clone(), &mut damaged);
            assert!(damaged.is_empty(), "{damaged:?}");
            documents
        };
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("a.yaml"), "a: 1").unwrap();
        let mut documents = open();
        assert_eq!(documents.list(false).unwrap().len(), 1);

        // Moved away, so that its inode is not used again.
        fs::rename(&dir, root.path().join("former")).unwrap();
        assert!(matches!(documents.list(true), Err(ListError::Io(_))));
        fs::create_dir(&dir).unwrap();
        for documents in [&mut documents, &mut open()] {
            let error = documents.list(true).unwrap_err();
            assert!(matches!(error, ListError::Emptied), "{error}");
            assert!(error.remedy(&dir).contains("none.yaml"));
        }
        // Nothing was there before.
        assert!(open().list(false).unwrap().is_empty());
        fs::remove_file(&file).unwrap();

        // A document in the directory shows that it is the right one.
        fs::write(dir.join("none.yaml"), "---").unwrap();
        assert_eq!(documents.list(true).unwrap().len(), 1);
        fs::remove_file(dir.join("none.yaml")).unwrap();
        assert!(documents.list(true).unwrap().is_empty());
        assert!(open().list(true).unwrap().is_empty());

        fs::write(&file, "{").unwrap();
        let mut damaged = Vec::new();
        DocumentDir::stored(&dir, file.clone(), &mut damaged);
        assert_eq!(damaged.len(), 1);
        assert!(damaged[0].contains("record.json.corrupt"), "{damaged:?}");
    }
}
