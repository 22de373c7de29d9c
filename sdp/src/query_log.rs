//! The query log: one JSON object a line for queries that were judged, off by default.
//!
//! ```text
//!  workers, TCP tasks ─ submit ─► bounded queue ─► thread `query-log` ─► file, stdout or stderr
//!                          └ full: dropped and counted; a later line has the number
//! ```
//! Threads that serve queries never wait for the writer. If the writer is too slow, lines are lost.

mod line;
mod output;
mod settings;

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, TrySendError, sync_channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use clap::Args;
use dns_policy::wall_time;
use parking_lot::Mutex;
use rand::Rng as _;
use serde::{Deserialize, Serialize};

use self::{line::Line, output::Output};
pub(crate) use self::{
    line::{Entry, QueryEnd},
    settings::{Sample, Target, Which},
};
use crate::stats::Count;

/// Maximum number of lines that wait for the writer.
const QUEUE: usize = 8192;
/// Maximum number of lines that are written with one call.
const BATCH: usize = 128;
/// How often the writer checks for dropped lines while it receives none.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Time for which closing waits for a writer that is blocked by a pipe without a reader.
const STUCK: Duration = Duration::from_secs(1);

/// Selection of queries, and destination of the lines.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct QueryLogConfig {
    /// Queries in the query log, one JSON object a line: off, denied, or all judged queries
    #[arg(long = "query-log", value_name = "WHICH", value_enum, default_value_t)]
    pub which: Which,
    /// Destination of the query log: stdout, stderr or the path of a file; the file may be moved away at any time, and a new one is then started
    #[arg(long = "query-log-file", value_name = "WHERE", default_value_t)]
    pub target: Target,
    /// Share of the queries in the query log, such as 1/100
    #[arg(long = "query-log-sample", value_name = "1/N", default_value = "1")]
    pub sample: Sample,
}

/// Counters of the query log.
#[derive(Clone, Debug, Default)]
pub struct QueryLogStats {
    /// Lines that were written to the output.
    pub lines: Count,
    /// Lines lost: the queue was full, or the write failed.
    pub dropped: Count,
    /// Failed writes, and failed attempts to open the output again.
    pub errors: Count,
}

/// State of the query log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueryLogStatus {
    /// `denied` or `all`.
    pub which: String,
    /// `stdout`, `stderr` or a path.
    pub target: String,
    /// The log has one query in this many.
    pub one_in: u32,
    /// Lines written since the process started.
    pub lines: u64,
    /// Lines lost since the process started, because the queue was full or a write failed.
    pub dropped: u64,
    /// The last error, if the last attempt failed.
    pub problem: Option<String>,
}

/// The sending end of the log. It exists only if the log is on.
#[derive(Debug)]
pub struct QueryLog {
    config: QueryLogConfig,
    /// Number of lines that were dropped because the queue was full, and that the log does not
    /// mention yet.
    dropped: Arc<AtomicU64>,
    queue: SyncSender<Message>,
    closing: Arc<AtomicBool>,
    problem: Arc<Mutex<Option<String>>>,
    stats: QueryLogStats,
    writer: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
enum Message {
    Line(Box<Entry>),
    Close,
}

impl QueryLog {
    /// Opens the output and starts the thread. If a file cannot be opened, the writer tries again
    /// with each write. Lines are lost until that succeeds.
    pub fn open(config: &QueryLogConfig, stats: &QueryLogStats) -> io::Result<Self> {
        let output = Output::new(config.target.clone());
        Self::start(config, stats, output, QUEUE)
    }

    fn start(
        config: &QueryLogConfig,
        stats: &QueryLogStats,
        mut output: Output,
        room: usize,
    ) -> io::Result<Self> {
        let problem = output.follow(Instant::now()).err();
        if let Some(error) = &problem {
            stats.errors.add(1);
            tracing::error!(
                %error,
                "no query log: the user that the proxy runs as must be able to make files there, \
                 so give it a directory of its own; tried again"
            );
        }
        let (queue, lines) = sync_channel(room);
        let log = Self {
            config: config.clone(),
            dropped: Arc::default(),
            queue,
            closing: Arc::default(),
            problem: Arc::new(Mutex::new(problem.map(|error| error.to_string()))),
            stats: stats.clone(),
            writer: Mutex::new(None),
        };
        let writer = Writer {
            lines,
            output,
            buffer: Vec::new(),
            waiting: 0,
            reporting: 0,
            one_in: config.sample.one_in(),
            dropped: Arc::clone(&log.dropped),
            closing: Arc::clone(&log.closing),
            problem: Arc::clone(&log.problem),
            stats: stats.clone(),
        };
        let thread = std::thread::Builder::new().name("query-log".to_owned());
        *log.writer.lock() = Some(thread.spawn(move || writer.run())?);
        Ok(log)
    }

    /// Whether to log a query with this verdict. Call this once per query. The sample is random
    /// because queries come in pairs (A and AAAA), and every other query would always be of the
    /// same type.
    pub fn takes(&self, allowed: bool) -> bool {
        let wanted = match self.config.which {
            Which::All => true,
            Which::Denied => !allowed,
            Which::Off => false,
        };
        let one_in = self.config.sample.one_in();
        wanted && (one_in == 1 || rand::rng().random_ratio(1, one_in))
    }

    /// Queues an entry for the writer, unless too many entries already wait.
    pub fn submit(&self, entry: Box<Entry>) {
        let sent = self.queue.try_send(Message::Line(entry));
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) = sent {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            self.stats.dropped.add(1);
        }
    }

    pub fn status(&self) -> QueryLogStatus {
        QueryLogStatus {
            which: self.config.which.as_str().to_owned(),
            target: self.config.target.to_string(),
            one_in: self.config.sample.one_in(),
            lines: self.stats.lines.get(),
            dropped: self.stats.dropped.get(),
            problem: self.problem.lock().clone(),
        }
    }

    /// Writes the waiting lines and ends the thread. If the thread is blocked, it runs until the
    /// process ends.
    pub async fn close(&self) {
        self.closing.store(true, Ordering::Release);
        // If the queue is full, the writer is awake and checks the flag next.
        let _ = self.queue.try_send(Message::Close);
        let Some(writer) = self.writer.lock().take() else {
            return;
        };
        let ended = async {
            while !writer.is_finished() {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        if tokio::time::timeout(STUCK, ended).await.is_err() {
            tracing::warn!("query log blocked at exit: its waiting lines are lost");
        }
    }
}

/// The part of the log that runs in the thread `query-log`.
struct Writer {
    lines: Receiver<Message>,
    output: Output,
    buffer: Vec<u8>,
    /// Lines in the buffer that are not written yet.
    waiting: u64,
    /// Number of lost lines that the buffer mentions.
    reporting: u64,
    one_in: u32,
    dropped: Arc<AtomicU64>,
    closing: Arc<AtomicBool>,
    problem: Arc<Mutex<Option<String>>>,
    stats: QueryLogStats,
}

impl Writer {
    fn run(mut self) {
        loop {
            let mut over = match self.lines.recv_timeout(POLL_INTERVAL) {
                Ok(message) => self.take(message),
                Err(RecvTimeoutError::Timeout) => false,
                Err(RecvTimeoutError::Disconnected) => true,
            };
            for _ in 1..BATCH {
                match self.lines.try_recv() {
                    Ok(message) => over |= self.take(message),
                    Err(TryRecvError::Empty) => {
                        over |= self.closing.load(Ordering::Acquire);
                        break;
                    }
                    Err(TryRecvError::Disconnected) => break,
                }
            }
            self.tell_dropped();
            self.flush(Instant::now());
            if over {
                return;
            }
        }
    }

    /// Handles a message. Returns whether it was the last one.
    fn take(&mut self, message: Message) -> bool {
        match message {
            Message::Line(entry) => {
                Line::of(&entry, self.one_in).write(&mut self.buffer);
                self.waiting += 1;
                false
            }
            Message::Close => true,
        }
    }

    fn tell_dropped(&mut self) {
        let dropped = self.dropped.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            line::dropped(wall_time::now(), dropped, &mut self.buffer);
            self.reporting = dropped;
        }
    }

    fn flush(&mut self, now: Instant) {
        let lines = std::mem::take(&mut self.waiting);
        let reported = std::mem::take(&mut self.reporting);
        if self.buffer.is_empty() {
            return;
        }
        let (written, reopened) = self.output.write(&self.buffer, now);
        self.buffer.clear();
        match &written {
            Ok(()) => self.stats.lines.add(lines),
            Err(_) => {
                self.dropped.fetch_add(lines + reported, Ordering::Relaxed);
                self.stats.dropped.add(lines);
            }
        }
        let problem = written.and(reopened).err().map(|error| error.to_string());
        if let Some(why) = &problem {
            self.stats.errors.add(1);
            if self.problem.lock().as_ref() != Some(why) {
                tracing::warn!(why, "cannot write the query log");
            }
        }
        *self.problem.lock() = problem;
    }
}

#[cfg(test)]
mod tests;
