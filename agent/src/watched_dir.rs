//! A directory of documents that is looked at again when it changes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, Metadata},
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use daemon::regular_file::{self, FileError};
use dns_policy::wall_time;
use notify::{RecursiveMode, Watcher as _};
use tokio::sync::Notify;

/// Editors and config maps change several files in a row: one look serves for all of them.
const SETTLE: Duration = Duration::from_millis(50);
/// Time between looks without a notification: inotify loses events when its queue overflows.
const RESCAN: Duration = Duration::from_secs(5);

/// Waits for changes of one directory.
#[derive(Debug)]
pub(crate) struct WatchedDir {
    changed: Arc<Notify>,
    _watcher: Option<notify::RecommendedWatcher>,
}

impl WatchedDir {
    /// Watches `dir`. Without inotify, the directory is looked at every five seconds.
    pub(crate) fn new(dir: &Path) -> Self {
        let changed = Arc::new(Notify::new());
        let signal = Arc::clone(&changed);
        let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            // An access, such as the agent's own reading of the directory, is an event too.
            if !matches!(&event, Ok(event) if event.kind.is_access()) {
                signal.notify_one();
            }
        })
        .and_then(|mut watcher| {
            watcher.watch(dir, RecursiveMode::NonRecursive)?;
            Ok(watcher)
        });
        let watcher = watcher
            .inspect_err(|error| {
                tracing::warn!(dir = %dir.display(), %error, "cannot watch the directory for changes; the agent reads it every five seconds");
            })
            .ok();
        Self {
            changed,
            _watcher: watcher,
        }
    }

    /// Returns when the directory may have changed, at the latest after five seconds.
    pub(crate) async fn changed(&self) {
        if tokio::time::timeout(RESCAN, self.changed.notified())
            .await
            .is_ok()
        {
            tokio::time::sleep(SETTLE).await;
        }
    }
}

/// Text of each file, or why it cannot be read, by name.
pub(crate) type Texts = BTreeMap<String, Result<String, FileError>>;

/// The files of these names with their text.
pub(crate) fn read(dir: &Path, names: BTreeSet<String>) -> Texts {
    let read = |name: String| {
        let text = read_file(&dir.join(&name));
        (name, text)
    };
    names.into_iter().map(read).collect()
}

/// Names of the document files of `dir`, sorted. Hidden files (ConfigMaps and editors make such files) and files with
/// other endings are ignored. A directory with the name of a document is listed: a runtime makes one for a bind mount
/// of a missing file, in the place of the file.
pub fn names(dir: &Path) -> io::Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(dir)? {
        let path: PathBuf = entry?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
            continue;
        };
        let wanted = path
            .extension()
            .and_then(|ending| ending.to_str())
            .is_some_and(|ending| matches!(ending, "yaml" | "yml" | "json"));
        if name.starts_with('.') || !wanted {
            continue;
        }
        names.insert(name.to_owned());
    }
    Ok(names)
}

/// Files larger than this (bytes) are read again only if their stamp changed.
const LARGE: u64 = 1 << 20;
/// A file that changed so recently may change again without another time of change.
const CLOCK: Duration = Duration::from_secs(2);

/// Identifies the version of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    /// The stamp of the file at `path`; `None` if the file must be read to see whether it changed: it is small, or
    /// changed just now.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        let stamp = Self::settled(&fs::metadata(path).ok()?);
        stamp.filter(|stamp| stamp.size > LARGE)
    }

    /// The stamp of a file; `None` if the file changed just now, so that a later change may have the same stamp.
    pub(crate) fn settled(metadata: &Metadata) -> Option<Self> {
        let changed = Duration::from_secs(u64::try_from(metadata.ctime()).ok()?);
        let age = Duration::from_nanos(wall_time::now()).checked_sub(changed)?;
        (age > CLOCK).then(|| Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }
}

/// Reads a file of documents.
pub fn read_file(path: &Path) -> Result<String, FileError> {
    regular_file::read_text(path)
}

#[cfg(test)]
mod tests {
    use nix::sys::stat::Mode;

    use super::*;

    #[test]
    fn pipes_and_devices_are_refused_without_being_opened() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe.yaml");
        nix::unistd::mkfifo(&pipe, Mode::from_bits_truncate(0o600)).unwrap();
        std::os::unix::fs::symlink("/dev/zero", dir.path().join("zero.yaml")).unwrap();
        let sparse = fs::File::create(dir.path().join("sparse.yaml")).unwrap();
        sparse.set_len(regular_file::MAX_FILE + 1).unwrap();
        fs::create_dir(dir.path().join("made.yaml")).unwrap();
        fs::write(dir.path().join("good.yaml"), "a: 1\n").unwrap();
        std::os::unix::fs::symlink("good.yaml", dir.path().join("linked.yaml")).unwrap();
        let mut files = read(dir.path(), names(dir.path()).unwrap());
        for name in ["good.yaml", "linked.yaml"] {
            assert_eq!(files.remove(name).unwrap().unwrap(), "a: 1\n");
        }
        for (name, says) in [
            ("pipe.yaml", "named pipe"),
            ("zero.yaml", "character device"),
            ("made.yaml", "a directory"),
            ("sparse.yaml", "268435457 bytes"),
        ] {
            let error = files.remove(name).unwrap().unwrap_err();
            assert!(error.to_string().contains(says), "{error}");
        }
    }
}
