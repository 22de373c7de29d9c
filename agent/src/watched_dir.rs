//! A directory of documents that is looked at again when it changes.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use notify::{RecursiveMode, Watcher as _};
use tokio::sync::Notify;

/// Editors and config maps change several files in a row: one look for all of them.
const SETTLE: Duration = Duration::from_millis(50);
/// Looks without a notification: inotify loses events when its queue overflows.
const RESCAN: Duration = Duration::from_secs(5);

/// Waits for changes of one directory.
#[derive(Debug)]
pub struct WatchedDir {
    changed: Arc<Notify>,
    _watcher: Option<notify::RecommendedWatcher>,
}

impl WatchedDir {
    /// Watches `dir`. Where inotify cannot be had, it is looked at every five seconds.
    pub fn new(dir: &Path) -> Self {
        let changed = Arc::new(Notify::new());
        let signal = Arc::clone(&changed);
        let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            // Reading the directory is an event of its own.
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
                tracing::warn!(dir = %dir.display(), %error, "cannot watch the directory; reading it every five seconds");
            })
            .ok();
        Self {
            changed,
            _watcher: watcher,
        }
    }

    /// Returns when the directory may have changed, at the latest after five seconds.
    pub async fn changed(&self) {
        if tokio::time::timeout(RESCAN, self.changed.notified())
            .await
            .is_ok()
        {
            tokio::time::sleep(SETTLE).await;
        }
    }
}

/// Document files of `dir` with their text, sorted by name. Hidden files
/// (as config maps and editors leave them) and other endings are passed over.
pub fn read(dir: &Path) -> io::Result<BTreeMap<String, Result<String, io::Error>>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(dir)? {
        let path: PathBuf = entry?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
            continue;
        };
        let wanted = path
            .extension()
            .and_then(|ending| ending.to_str())
            .is_some_and(|ending| matches!(ending, "yaml" | "yml" | "json"));
        if name.starts_with('.') || !wanted || path.is_dir() {
            continue;
        }
        files.insert(name.to_owned(), fs::read_to_string(&path));
    }
    Ok(files)
}
