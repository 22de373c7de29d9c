//! The journal: a file with the pairs of name and address that no agent has made durable. The file
//! outlives this process, and any proxy of the node may adopt it.
//!
//! ```text
//!      sink ─── note ──► queue ─► writer's thread ─► own file (locked)
//!        ▲                             │ looks for files without a lock
//!        └──────────── adopt ──────────┘ takes them up, removes them
//! ```
//! Reasons and guarantees: docs/design/0007-journal.md.

pub(crate) mod directory;
mod file;
pub mod ledger;
pub(crate) mod record;
mod writer;

use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use dns_policy::{boot_time::BootTime, mapping::EndpointInstance};
use limits::quota::Quota;
use parking_lot::{Condvar, Mutex};
use shared_maps::user::{BOOT_ID, boot_id};

pub use self::ledger::{Note, Written};
#[cfg(test)]
pub(crate) use self::writer::PAIRS;
use self::writer::Writer;
use crate::{mapping::OnRealised, stats::Count};

/// Maximum number of notes that wait for the writer thread. Each endpoint has a share of it.
const QUEUE: usize = 65_536;
/// Maximum number of answers that wait for a write. Each endpoint has a share of it. Further
/// answers are released without waiting.
const WAITING: usize = 16_384;
/// Delay after which entries are written together, unless a caller waits for one.
const TOGETHER: Duration = Duration::from_millis(20);

/// The queue to the writer thread, and the state of the journal.
#[derive(Debug)]
pub struct Journal {
    queue: Mutex<Queue>,
    wake: Condvar,
    /// Whether answers may wait until their mappings are written.
    works: AtomicBool,
    /// Whether answers wait for a write that is queued or under way.
    pending: AtomicBool,
    /// When the thread began to wait for the disk; 0 if it does not wait.
    busy_since: AtomicU64,
    closed: AtomicBool,
    shown: Mutex<JournalStatus>,
    stats: JournalStats,
}

struct Queue {
    notes: Vec<Note>,
    noted: Quota,
    waiting: Vec<OnRealised>,
    waits: Quota,
    /// Whether the thread was woken since it last took notes.
    woken: bool,
    closing: bool,
}

impl Default for Queue {
    fn default() -> Self {
        Self {
            notes: Vec::new(),
            noted: Quota::new(QUEUE),
            waiting: Vec::new(),
            waits: Quota::new(WAITING),
            woken: false,
            closing: false,
        }
    }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue")
            .field("notes", &self.notes.len())
            .field("waiting", &self.waiting.len())
            .field("closing", &self.closing)
            .finish()
    }
}

/// Counters of the journal since the process started.
#[derive(Clone, Debug, Default)]
pub struct JournalStats {
    /// Journals of other processes that this one adopted.
    pub adopted_files: Count,
    pub adopted_pairs: Count,
    /// Files whose last record was incomplete.
    pub torn: Count,
    /// Files set aside because they made no sense.
    pub damaged: Count,
    /// Writes and other operations on files that failed.
    pub errors: Count,
    /// Notes dropped because too many waited for the disk.
    pub skipped: Count,
}

/// State of the journal for `status`.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct JournalStatus {
    /// The file, if there is one.
    pub path: Option<String>,
    /// Why the pairs are in memory only; `None` if the file has them.
    pub memory_only: Option<String>,
    /// Pairs that no agent has made durable.
    pub pairs: usize,
    /// Length of the file, bytes.
    pub bytes: u64,
    /// Journals of other processes that this one adopted.
    pub adopted_files: u64,
    pub adopted_pairs: u64,
    /// Pairs or notes dropped because there were too many.
    pub dropped: u64,
    /// Writes, or other operations on files, that failed.
    pub errors: u64,
    /// Files that this release cannot read, and why.
    pub refused: Vec<String>,
}

impl Default for Journal {
    fn default() -> Self {
        let shown = JournalStatus {
            memory_only: Some("not opened yet".to_owned()),
            ..JournalStatus::default()
        };
        Self {
            queue: Mutex::default(),
            wake: Condvar::new(),
            works: AtomicBool::new(false),
            pending: AtomicBool::new(false),
            busy_since: AtomicU64::new(0),
            closed: AtomicBool::new(true),
            shown: Mutex::new(shown),
            stats: JournalStats::default(),
        }
    }
}

impl Journal {
    /// Starts the thread. Its file is in `dir` and is named after `name`. Mappings that other
    /// processes left there go to `adopt`, which must not block.
    pub fn start(
        self: &Arc<Self>,
        dir: &Path,
        name: &str,
        adopt: impl Fn(Vec<Written>) + Send + 'static,
    ) {
        let boot_id = match boot_id() {
            Ok(boot_id) => boot_id,
            Err(error) => return self.fails(BOOT_ID, &error),
        };
        self.start_in_boot(dir.to_owned(), name, boot_id, Box::new(adopt));
    }

    fn start_in_boot(
        self: &Arc<Self>,
        dir: PathBuf,
        name: &str,
        boot_id: String,
        adopt: writer::Adopt,
    ) {
        let writer = Writer::new(dir, name.to_owned(), boot_id, adopt);
        self.closed.store(false, Ordering::Release);
        let journal = Arc::clone(self);
        let thread = std::thread::Builder::new().name("journal".to_owned());
        let spawned = thread.spawn(move || {
            writer.run(&journal);
            journal.works.store(false, Ordering::Release);
            journal.closed.store(true, Ordering::Release);
        });
        if let Err(error) = spawned {
            self.closed.store(true, Ordering::Release);
            self.fails("a thread", &error);
        }
    }

    /// Queues a note for the writer and wakes it. If the endpoint's share of the queue is used up,
    /// the note is dropped and counted. A revocation is always queued.
    pub fn note(&self, note: Note) {
        self.note_later(note);
        self.nudge();
    }

    /// Queues a note that is written after the next [`Self::nudge`]. Waking the thread takes a
    /// system call, for which some callers have no time.
    pub fn note_later(&self, note: Note) {
        let mut queue = self.queue.lock();
        if self.closed.load(Ordering::Acquire) {
            return;
        }
        // A revocation has no holder and is always queued: a file without it would reopen what is
        // closed.
        if note
            .holder()
            .is_some_and(|holder| !queue.noted.take(holder, 1))
        {
            drop(queue);
            self.stats.skipped.add(1);
            return;
        }
        queue.notes.push(note);
    }

    /// Wakes the thread if there are notes and it was not woken for them.
    pub fn nudge(&self) {
        let mut queue = self.queue.lock();
        if !queue.notes.is_empty() && !queue.woken {
            queue.woken = true;
            drop(queue);
            self.wake.notify_one();
        }
    }

    /// Whether an answer may wait for its write: the file can be written, and the disk takes it.
    pub fn may_wait(&self, now: BootTime, max_delay: Duration) -> bool {
        let since = self.busy_since.load(Ordering::Acquire);
        self.works.load(Ordering::Acquire)
            && (since == 0 || BootTime::from_nanos(since).plus(max_delay) > now)
    }

    /// Queues a note that is written at once. `done` is called after the write. Returns `done` if
    /// too many answers wait.
    pub fn note_first(
        &self,
        endpoint: EndpointInstance,
        note: Note,
        done: OnRealised,
    ) -> Result<(), OnRealised> {
        let holder = endpoint.into();
        let mut queue = self.queue.lock();
        let may = queue.waits.allows(holder, 1) && queue.noted.allows(holder, 1);
        if !may || queue.closing || self.closed.load(Ordering::Acquire) {
            drop(queue);
            self.note(note);
            return Err(done);
        }
        queue.noted.add(holder, 1);
        queue.notes.push(note);
        queue.waits.add(holder, 1);
        queue.waiting.push(done);
        self.pending.store(true, Ordering::Release);
        self.wake.notify_one();
        Ok(())
    }

    /// Arranges that `done` is called once the notes of [`Self::note_first`] are written. Returns
    /// `done` if no such note is waiting, or if too many answers wait.
    pub fn wait_behind(
        &self,
        endpoint: EndpointInstance,
        done: OnRealised,
    ) -> Result<(), OnRealised> {
        if !self.pending.load(Ordering::Acquire) {
            return Err(done);
        }
        let mut queue = self.queue.lock();
        let over = queue.closing || !self.pending.load(Ordering::Acquire);
        if over || !queue.waits.take(endpoint.into(), 1) {
            return Err(done);
        }
        queue.waiting.push(done);
        self.wake.notify_one();
        Ok(())
    }

    /// Writes everything and closes the file. A file without records is removed. A file with
    /// records is left to the next process that finds it.
    pub async fn close(&self) {
        self.queue.lock().closing = true;
        self.wake.notify_one();
        while !self.closed.load(Ordering::Acquire) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    pub fn status(&self) -> JournalStatus {
        let mut status = self.shown.lock().clone();
        status.adopted_files = self.stats.adopted_files.get();
        status.adopted_pairs = self.stats.adopted_pairs.get();
        status.errors = self.stats.errors.get();
        status.dropped += self.stats.skipped.get();
        status
    }

    pub fn stats(&self) -> &JournalStats {
        &self.stats
    }

    /// Accepts notes again: the caller is a writer that calls [`Self::take`] and writes the
    /// entries.
    pub fn attend(&self) {
        self.closed.store(false, Ordering::Release);
        self.works();
    }

    /// Takes the notes, and the callbacks that wait for their write. Call [`Self::written`] after
    /// the write.
    pub fn take(&self) -> (Vec<Note>, Vec<OnRealised>) {
        let mut queue = self.queue.lock();
        let notes = std::mem::take(&mut queue.notes);
        queue.noted.clear();
        queue.waits.clear();
        queue.woken = false;
        (notes, std::mem::take(&mut queue.waiting))
    }

    /// Records that the taken entries are written.
    pub fn written(&self) {
        let queue = self.queue.lock();
        self.pending
            .store(!queue.waiting.is_empty(), Ordering::Release);
    }

    /// Called by the thread: waits for notes, `limit` at most. Returns whether the thread must end.
    fn wait(&self, limit: Duration) -> bool {
        self.busy_since.store(0, Ordering::Release);
        let mut queue = self.queue.lock();
        if queue.notes.is_empty() && queue.waiting.is_empty() && !queue.closing {
            self.wake.wait_for(&mut queue, limit);
        }
        if queue.waiting.is_empty() && !queue.notes.is_empty() && !queue.closing {
            self.wake.wait_for(&mut queue, TOGETHER);
        }
        self.busy_since
            .store(BootTime::now().nanos(), Ordering::Release);
        queue.closing
    }

    fn works(&self) {
        self.works.store(true, Ordering::Release);
        self.shown.lock().memory_only = None;
    }

    fn fails(&self, place: &str, error: &io::Error) {
        self.works.store(false, Ordering::Release);
        self.stats.errors.add(1);
        let why = format!("{place}: {error}");
        let before = self.shown.lock().memory_only.replace(why.clone());
        if before.as_ref() != Some(&why) {
            tracing::warn!(why, "cannot write the journal; mappings are in memory only");
        }
    }

    fn refused(&self, refused: &[String]) {
        let before = std::mem::replace(&mut self.shown.lock().refused, refused.to_vec());
        for text in refused.iter().filter(|text| !before.contains(text)) {
            tracing::warn!("a journal cannot be adopted: {text}");
        }
    }

    fn report(&self, file: Option<(&Path, u64)>, pairs: usize, dropped: u64) {
        let mut shown = self.shown.lock();
        let path = file.map(|(path, _)| path);
        // This runs after every batch, so the text is made only when the path changes.
        if shown.path.as_deref().map(Path::new) != path {
            shown.path = path.map(|path| path.display().to_string());
        }
        shown.bytes = file.map_or(0, |(_, bytes)| bytes);
        shown.pairs = pairs;
        shown.dropped = dropped;
    }
}

impl JournalStatus {
    /// The state as one line for a terminal.
    pub fn text(&self) -> String {
        let place = match (&self.memory_only, &self.path) {
            (Some(why), _) => format!("memory only ({why})"),
            (None, path) => path.clone().unwrap_or_default(),
        };
        let mut text = format!("{place}: {} pairs, {} bytes", self.pairs, self.bytes);
        for (number, what) in [
            (self.adopted_files, "adopted from other proxies"),
            (self.dropped, "dropped"),
            (self.errors, "errors"),
        ] {
            if number > 0 {
                text.push_str(&format!(", {number} {what}"));
            }
        }
        for refused in &self.refused {
            text.push_str(&format!("; not adopted: {refused}"));
        }
        text
    }
}

#[cfg(test)]
mod tests;
