//! Journal files: the file of this process, and files of processes that have ended.
//!
//! A file belongs to the process that holds its lock (`flock`). The kernel releases the lock when
//! the process ends for any reason. Nothing is ever synced to the disk: what a killed process wrote
//! stays in the page cache. A crash of the machine may lose writes, but entries of an earlier boot
//! are never used.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use super::{directory, record::HEADER};
use crate::regular_file;

/// Extension of the file names of journals.
const ENDING: &str = "journal";
/// Extension of a file that is being made.
const NEW: &str = "new";
/// Maximum length of a file, in bytes. A longer file is not one of our journals.
const MAX_FILE: u64 = 256 << 20;

/// A locked file that this process appends to.
#[derive(Debug)]
pub(super) struct OwnFile {
    path: PathBuf,
    file: File,
    len: u64,
}

impl OwnFile {
    /// Makes the directory if it is missing, and in it a file named after `name` that contains
    /// `image`.
    pub(super) fn create(dir: &Path, name: &str, image: &[u8]) -> io::Result<Self> {
        directory::make(dir)?;
        let path = dir.join(format!("{name}.{}.{ENDING}", std::process::id()));
        let file = Self::put(&path, image)?;
        let len = u64::try_from(image.len()).unwrap_or(u64::MAX);
        Ok(Self { path, file, len })
    }

    /// Puts a locked file with `image` in it at `path`: no process sees it unlocked or half written.
    fn put(path: &Path, image: &[u8]) -> io::Result<File> {
        let new = path.with_extension(NEW);
        let mut file = OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o600)
            .open(&new)?;
        let outcome = lock(&file)
            .and_then(|()| file.set_len(0))
            .and_then(|()| file.write_all(image))
            .and_then(|()| fs::rename(&new, path));
        if let Err(error) = outcome {
            let _gone_or_not = fs::remove_file(&new);
            return Err(error);
        }
        Ok(file)
    }

    /// Replaces the content of the file.
    pub(super) fn replace(&mut self, image: &[u8]) -> io::Result<()> {
        self.file = Self::put(&self.path, image)?;
        self.len = u64::try_from(image.len()).unwrap_or(u64::MAX);
        Ok(())
    }

    /// Appends records. After an error the file has its former content.
    pub(super) fn append(&mut self, records: &[u8]) -> io::Result<()> {
        if let Err(error) = self.file.write_all(records) {
            // Half a record would hide the records after it.
            self.file.set_len(self.len)?;
            return Err(error);
        }
        self.len += u64::try_from(records.len()).unwrap_or(u64::MAX);
        Ok(())
    }

    /// Shortens the file to its header, so that it has no records.
    pub(super) fn clear(&mut self) -> io::Result<()> {
        let header = u64::try_from(HEADER).unwrap_or(u64::MAX);
        if self.len > header {
            self.file.set_len(header)?;
            self.len = header;
        }
        Ok(())
    }

    /// Whether another process removed or replaced the file.
    pub(super) fn is_lost(&self) -> bool {
        !is_at(&self.file, &self.path)
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn remove(self) -> io::Result<()> {
        fs::remove_file(&self.path)
    }
}

/// A file whose writer has ended, locked by this process.
#[derive(Debug)]
pub(super) struct Orphan {
    path: PathBuf,
    file: File,
}

impl Orphan {
    /// Every file in `dir` that no process has locked, except `own`.
    pub(super) fn find(dir: &Path, own: Option<&Path>) -> io::Result<Vec<Self>> {
        let mut found = Vec::new();
        directory::check(dir)?;
        for entry in fs::read_dir(dir)? {
            let path = entry?.path();
            if own == Some(&path) {
                continue;
            }
            match path.extension().and_then(|ending| ending.to_str()) {
                Some(ENDING) => found.extend(Self::open(&path)),
                // A process was killed while it made this file.
                Some(NEW) => {
                    if let Some(left) = Self::open(&path) {
                        left.remove()?;
                    }
                }
                _ => {}
            }
        }
        Ok(found)
    }

    fn open(path: &Path) -> Option<Self> {
        let file = regular_file::open(path, OpenOptions::new().read(true)).ok()?;
        // Between opening and locking, another process may have adopted and removed the file.
        (lock(&file).is_ok() && is_at(&file, path)).then(|| Self {
            path: path.to_owned(),
            file,
        })
    }

    pub(super) fn bytes(&self) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        (&self.file).take(MAX_FILE).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn remove(&self) -> io::Result<()> {
        if is_at(&self.file, &self.path) {
            fs::remove_file(&self.path)?;
        }
        Ok(())
    }

    /// Renames the file, so that no process adopts it and a person can look at it.
    pub(super) fn set_aside(&self) -> io::Result<()> {
        let mut path = self.path.clone().into_os_string();
        path.push(".corrupt");
        fs::rename(&self.path, path)
    }
}

fn lock(file: &File) -> io::Result<()> {
    file.try_lock().map_err(io::Error::from)
}

fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(one), Ok(other)) => one.ino() == other.ino() && one.dev() == other.dev(),
        _ => false,
    }
}
