//! The task that stores the listing of the cluster. Neither the core nor the reader of documents
//! waits for the disk.

use std::{io, sync::Arc, time::Duration};

use agent_core::policy::source::cluster::Changed;
use parking_lot::Mutex;
use shared_maps::user::trim_heap;
use tokio::{
    sync::Notify,
    task::spawn_blocking,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use super::{health::ClusterHealth, listing_file::ListingFile};

/// Time between two writes of the file.
const INTERVAL: Duration = Duration::from_secs(60);
/// With more bytes of changes than this, the task writes them to the partial file at once, even if
/// the listing is not complete or the last write is less than [`INTERVAL`] ago.
const ROOM: usize = 4 << 20;
/// Maximum bytes of changes that wait while the disk fails.
const MOST: usize = 64 << 20;

/// Changes that are not on disk yet.
#[derive(Debug, Default)]
pub struct Pending {
    state: Mutex<State>,
    due: Notify,
}

#[derive(Debug, Default)]
struct State {
    changed: Changed,
    bytes: usize,
    is_current: bool,
    /// Whether the listing on disk would have gaps: then nothing more is stored in this run.
    has_gaps: bool,
}

impl Pending {
    /// Adds changes. `is_current`: all kinds have been listed in this run.
    pub fn add(&self, changed: Changed, is_current: bool) {
        let mut state = self.state.lock();
        if state.has_gaps {
            return;
        }
        for (key, json) in changed {
            state.bytes += key.len() + json.as_ref().map_or(0, |json| json.as_str().len());
            state.changed.insert(key, json);
        }
        let is_first = is_current && !state.is_current;
        state.is_current = is_current;
        if state.bytes > MOST {
            tracing::error!(
                "the list of the cluster could not be written for so long that too many changes \
                 wait: it is not stored any more until the agent is started again"
            );
            state.give_up();
        }
        if is_first || state.bytes > ROOM {
            self.due.notify_one();
        }
    }

    /// Stores nothing more in this run, because the listing on disk would have gaps or cannot be trusted: for
    /// example, objects came without their JSON.
    pub fn give_up(&self) {
        self.state.lock().give_up();
    }

    /// Takes all changes; `None` if the listing has gaps.
    fn take(&self) -> Option<(Changed, usize, bool)> {
        let mut state = self.state.lock();
        if state.has_gaps {
            return None;
        }
        let bytes = std::mem::take(&mut state.bytes);
        Some((std::mem::take(&mut state.changed), bytes, state.is_current))
    }

    /// Puts changes back that could not be written. Later changes of the same objects stay.
    fn put_back(&self, changed: Changed, bytes: usize) {
        let mut state = self.state.lock();
        if !state.has_gaps {
            state.bytes += bytes;
            for (key, json) in changed {
                state.changed.entry(key).or_insert(json);
            }
        }
    }
}

impl State {
    fn give_up(&mut self) {
        *self = Self {
            has_gaps: true,
            ..Self::default()
        };
    }
}

/// What the task does after it has woken up.
enum Turn {
    Spill,
    Save,
    Confirm,
    Nothing,
}

impl Turn {
    fn of(is_due: bool, is_new: bool, bytes: usize, health: &ClusterHealth) -> Self {
        match (is_due, is_new) {
            (true, true) => Self::Save,
            (true, false) if health.is_fresh() => Self::Confirm,
            (false, _) if bytes > ROOM => Self::Spill,
            _ => Self::Nothing,
        }
    }
}

/// Stores the listing until the agent stops.
pub async fn run(
    pending: Arc<Pending>,
    mut file: ListingFile,
    health: ClusterHealth,
    stop: CancellationToken,
) {
    let mut saved: Option<Instant> = None;
    let mut failed = false;
    loop {
        let next = Instant::now() + INTERVAL;
        tokio::select! {
            () = pending.due.notified() => {}
            () = sleep_until(next) => {}
            () = stop.cancelled() => return,
        }
        let Some((changed, bytes, is_current)) = pending.take() else {
            return;
        };
        let is_due = is_current && saved.is_none_or(|at| at.elapsed() >= INTERVAL);
        let is_new = !changed.is_empty() || saved.is_none();
        let turn = Turn::of(is_due, is_new, bytes, &health);
        if matches!(turn, Turn::Save) {
            saved = Some(Instant::now());
        }
        let written = spawn_blocking(move || {
            let written = write(&mut file, &turn, &changed);
            let rest = match (&turn, &written) {
                (Turn::Nothing, _) | (_, Err(_)) => Some(changed),
                _ => None,
            };
            (file, rest, written)
        });
        let Ok((back, rest, result)) = written.await else {
            tracing::error!("storing the list of the cluster panicked (a bug); none is stored");
            pending.give_up();
            return;
        };
        file = back;
        match rest {
            Some(rest) => pending.put_back(rest, bytes),
            // The freed texts have left holes in the heap.
            None if bytes > ROOM / 4 => {
                let _trimmed = spawn_blocking(trim_heap).await;
            }
            None => {}
        }
        if let Err(error) = &result
            && error.kind() == io::ErrorKind::InvalidData
        {
            tracing::error!(%error, "the stored list of the cluster was changed by another program or a fault of the disk; none is stored until the agent is started again");
            pending.give_up();
            return;
        }
        if let (Err(error), false) = (&result, failed) {
            tracing::warn!(%error, "the list of the cluster cannot be stored in the state directory; the agent tries again");
        }
        failed = result.is_err();
    }
}

fn write(file: &mut ListingFile, turn: &Turn, changed: &Changed) -> io::Result<()> {
    match turn {
        Turn::Spill => file.spill(changed),
        Turn::Save => file.save(changed),
        Turn::Confirm => file.confirm(),
        Turn::Nothing => Ok(()),
    }
}
