//! Renewed certificates: read while the program runs, and used for every handshake that follows.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

use super::credentials::Credentials;
use crate::relay_settings::TlsFiles;

/// Time between two reads of the files.
pub(super) const EVERY: Duration = Duration::from_secs(10);

/// Why the files of a relay cannot be used, and since when. All clones share this state.
#[derive(Clone, Debug, Default)]
pub(super) struct Stale(Arc<Mutex<Option<(Instant, String)>>>);

impl Stale {
    /// For how many seconds the files could not be used; 0 = they can be used.
    pub(super) fn seconds(&self) -> u64 {
        let stale = self.0.lock();
        let since = stale.as_ref().map(|(since, _)| since.elapsed());
        since.map_or(0, |age| age.as_secs().max(1))
    }

    /// Sets why the files cannot be used; `None` = they can.
    pub(super) fn set(&self, problem: Option<String>) {
        let mut stale = self.0.lock();
        let known = stale.as_ref().map(|(_, reason)| reason);
        log_change(known, problem.as_ref());
        let since = stale.as_ref().map(|(since, _)| *since);
        *stale = problem.map(|reason| (since.unwrap_or_else(Instant::now), reason));
    }
}

/// Logs whether the files can be used, if that changed.
fn log_change(known: Option<&String>, problem: Option<&String>) {
    match problem {
        _ if known == problem => {}
        Some(reason) => tracing::warn!(
            reason,
            "the files of the certificates cannot be used; those that were read last are in use"
        ),
        None => tracing::info!("the files of the certificates can be used again"),
    }
}

/// Reads the files again and again. `report` gets why they cannot be used.
pub(super) async fn follow(
    files: TlsFiles,
    current: watch::Sender<Arc<Credentials>>,
    report: impl Fn(Option<String>),
    every: Duration,
    tasks: TaskTracker,
) {
    let files = Arc::new(files);
    loop {
        tokio::time::sleep(every).await;
        let (files, used) = (Arc::clone(&files), Arc::clone(&current.borrow()));
        // In a task of its own: a file system that does not answer must not block other tasks.
        let read = tasks.spawn_blocking(move || used.renewed(&files));
        let Ok(renewed) = read.await else {
            continue;
        };
        match renewed {
            Ok(renewed) => {
                report(None);
                if let Some(renewed) = renewed {
                    tracing::info!("renewed certificates are in use");
                    current.send_replace(Arc::new(renewed));
                }
            }
            Err(error) => report(Some(error.to_string())),
        }
    }
}
