//! How other threads reach a worker.

use std::{
    os::fd::AsFd,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, ThreadId},
    time::{Duration, Instant},
};

use dns_policy::mapping::Realised;
use nix::sys::eventfd::{EfdFlags, EventFd};
use parking_lot::Mutex;

use crate::arena::Key;

/// Commands and results for one worker.
#[derive(Debug)]
pub(super) struct Control {
    wake: EventFd,
    /// Thread of the worker, set when it begins to run.
    thread: OnceLock<ThreadId>,
    /// Results for held answers. Bounded by the number of held answers.
    realised: Mutex<Vec<(Key, Realised)>>,
    /// Whether the worker waits for events.
    asleep: AtomicBool,
    /// Number of times that the worker has begun or stopped waiting.
    turns: AtomicU64,
    draining: AtomicBool,
    /// Set by the worker when no new packets are steered to it.
    left: AtomicBool,
    stop: AtomicBool,
    /// Set by the worker when it has finished.
    done: AtomicBool,
    /// Number of queries that the worker dropped. It is set before `done`.
    abandoned: AtomicU64,
}

impl Control {
    pub(super) fn new() -> std::io::Result<Self> {
        let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
        Ok(Self {
            wake: EventFd::from_flags(flags)?,
            thread: OnceLock::new(),
            realised: Mutex::new(Vec::new()),
            asleep: AtomicBool::new(false),
            turns: AtomicU64::new(0),
            draining: AtomicBool::new(false),
            left: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            done: AtomicBool::new(false),
            abandoned: AtomicU64::new(0),
        })
    }

    /// Notes that the worker runs on this thread.
    pub(super) fn runs_here(&self) {
        self.thread.get_or_init(|| thread::current().id());
    }

    /// Adds the result for a held answer. It does not wake the worker for a result that the
    /// worker's own thread adds, because that thread calls [`Self::take_realised`] before it waits.
    pub(super) fn realised(&self, key: Key, realised: Realised) {
        let was_empty = {
            let mut queue = self.realised.lock();
            queue.push((key, realised));
            queue.len() == 1
        };
        if was_empty && self.thread.get() != Some(&thread::current().id()) {
            self.wake();
        }
    }

    /// Moves all results so far into `into`, which is cleared first.
    pub(super) fn take_realised(&self, into: &mut Vec<(Key, Realised)>) {
        into.clear();
        std::mem::swap(&mut *self.realised.lock(), into);
    }

    /// Notes that the worker is awake. Resets the counter, so that the next wake-up works.
    pub(super) fn woken(&self) {
        // EAGAIN means that the counter was already read. Its value has no meaning.
        let _ = self.wake.read();
    }

    pub(super) fn descriptor(&self) -> impl AsFd + '_ {
        self.wake.as_fd()
    }

    /// Notes that the worker begins or stops waiting.
    pub(super) fn sleeps(&self, asleep: bool) {
        self.turns.fetch_add(1, Ordering::Relaxed);
        self.asleep.store(asleep, Ordering::Release);
    }

    /// A number that grows while the worker runs.
    pub(super) fn turns(&self) -> u64 {
        self.turns.load(Ordering::Relaxed)
    }

    pub(super) fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::Acquire)
    }

    pub(super) fn drain(&self) {
        self.draining.store(true, Ordering::Release);
        self.wake();
    }

    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wake();
    }

    pub(super) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Notes that the worker gave up its slot.
    pub(super) fn leave(&self) {
        self.left.store(true, Ordering::Release);
    }

    pub(super) fn has_left(&self) -> bool {
        self.left.load(Ordering::Acquire) || self.is_done()
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    pub(super) fn finish(&self, abandoned: u64) {
        self.abandoned.store(abandoned, Ordering::Release);
        self.done.store(true, Ordering::Release);
    }

    pub(super) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    pub(super) fn abandoned(&self) -> u64 {
        self.abandoned.load(Ordering::Acquire)
    }

    fn wake(&self) {
        // EAGAIN: the counter is at its maximum, so the worker will wake up.
        let _ = self.wake.write(1);
    }
}

/// Decides when a draining worker may end.
#[derive(Debug)]
pub(super) struct Leaving {
    since: Instant,
    last_packet: Instant,
}

impl Leaving {
    /// Time after the release of the slots within which earlier steered packets arrive.
    const SETTLE: Duration = Duration::from_millis(50);
    /// Time without packets after which the queue counts as empty.
    const SILENCE: Duration = Duration::from_millis(30);
    /// How often a drain checks whether the slots were released.
    pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(1);
    /// Interval at which a draining worker checks whether it may end.
    pub(super) const TICK: Duration = Duration::from_millis(10);

    pub(super) fn new(now: Instant) -> Self {
        Self {
            since: now,
            last_packet: now,
        }
    }

    pub(super) fn packet(&mut self, now: Instant) {
        self.last_packet = now;
    }

    pub(super) fn is_quiet(&self, now: Instant) -> bool {
        now.duration_since(self.since) >= Self::SETTLE
            && now.duration_since(self.last_packet) >= Self::SILENCE
    }
}
