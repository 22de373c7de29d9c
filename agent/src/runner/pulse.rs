//! Signs of life of the core, and the thread that ends a process whose core hangs.
//!
//! The thread takes no lock, because a lock that the core holds while it hangs would stop this thread too. The thread
//! counts its own ticks. So the time in which the whole process was stopped, or the machine slept, does not count.

use std::{
    fs, io,
    os::fd::AsFd as _,
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

/// Time between two looks.
const TICK: Duration = Duration::from_secs(1);
/// A core that sleeps for this many ticks although it has work hangs: it waits for a lock or a system call.
const ASLEEP: u32 = 10;
/// A core that computes for this many ticks within one step hangs: it is in an endless loop.
const COMPUTING: u32 = 60;

/// Shows whether the core makes progress. Clones share one state.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pulse(Arc<Beats>);

#[derive(Debug, Default)]
struct Beats {
    count: AtomicU64,
    /// The core has something to do.
    is_busy: AtomicBool,
    /// Id of the core's thread; 0 = not started.
    thread: AtomicI32,
}

impl Pulse {
    /// Notes that the core has done a step.
    pub(crate) fn beat(&self) {
        self.0.count.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes the start of work. To be called on the core's thread.
    pub(super) fn begin(&self) {
        self.beat();
        self.0.is_busy.store(true, Ordering::Release);
    }

    /// Notes that the core's thread has nothing to do.
    pub(super) fn rest(&self) {
        self.0.is_busy.store(false, Ordering::Release);
    }

    /// Notes that this thread is the core's.
    pub(super) fn is_of_this_thread(&self) {
        let thread = nix::unistd::gettid().as_raw();
        self.0.thread.store(thread, Ordering::Release);
    }

    /// Starts the thread that ends this process if the core hangs. `prod` gives the core something to do and does not
    /// block; it returns false when the core has ended.
    ///
    /// # Errors
    /// The thread could not be started.
    pub(crate) fn watch(&self, prod: impl Fn() -> bool + Send + 'static) -> io::Result<()> {
        let pulse = self.clone();
        thread::Builder::new()
            .name("watchdog".to_owned())
            .spawn(move || {
                let mut stalled = Stalled::default();
                while prod() {
                    thread::sleep(TICK);
                    if let Some(text) = pulse.hangs(&mut stalled) {
                        // The log is not used: the core may hang while it holds the log's lock.
                        let stderr = io::stderr();
                        let _lost = nix::unistd::write(stderr.as_fd(), text.as_bytes());
                        process::abort();
                    }
                }
            })?;
        Ok(())
    }

    /// The message about a core that hangs. To be called once in a tick.
    fn hangs(&self, stalled: &mut Stalled) -> Option<String> {
        let beats = self.0.count.load(Ordering::Acquire);
        let ticks = stalled.ticks(beats);
        if ticks < ASLEEP {
            return None;
        }
        let thread = self.0.thread.load(Ordering::Acquire);
        let state = state_of(thread);
        if state == Some('R') && ticks < COMPUTING {
            return None;
        }
        let seconds = (TICK * ticks).as_secs();
        let state = state.map_or_else(|| "unknown".to_owned(), String::from);
        let is_busy = self.0.is_busy.load(Ordering::Acquire);
        let within = if is_busy { "one step" } else { "its sleep" };
        Some(format!(
            "the core's thread has not moved on for {seconds} s within {within} (state {state} of thread {thread}): \
             this agent ends itself, so that another one can take over\n"
        ))
    }
}

/// Ticks without a beat.
#[derive(Debug, Default)]
struct Stalled {
    beats: u64,
    ticks: u32,
}

impl Stalled {
    fn ticks(&mut self, beats: u64) -> u32 {
        self.ticks = if beats == self.beats {
            self.ticks + 1
        } else {
            0
        };
        self.beats = beats;
        self.ticks
    }
}

/// State of a thread of this process, as `proc_pid_stat(5)` abbreviates it.
fn state_of(thread: i32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/self/task/{thread}/stat")).ok()?;
    let (_, behind_name) = stat.rsplit_once(") ")?;
    behind_name.chars().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_that_moves_on_does_not_hang_and_one_that_sleeps_in_its_work_does() {
        let pulse = Pulse::default();
        pulse.is_of_this_thread();
        let mut stalled = Stalled::default();
        for _ in 0..3 * COMPUTING {
            pulse.beat();
            assert_eq!(pulse.hangs(&mut stalled), None);
        }
        // This thread computes: it has the longer limit.
        let ticks = (0..2 * COMPUTING).take_while(|_| pulse.hangs(&mut stalled).is_none());
        assert_eq!(ticks.count(), COMPUTING as usize - 1);
        let sleeper = pulse.clone();
        let (send, wait) = std::sync::mpsc::channel::<()>();
        let (started, begin) = std::sync::mpsc::channel();
        let thread = thread::spawn(move || {
            sleeper.is_of_this_thread();
            sleeper.begin();
            started.send(()).unwrap();
            let _end = wait.recv();
        });
        begin.recv().unwrap();
        while state_of(pulse.0.thread.load(Ordering::Acquire)) != Some('S') {
            thread::yield_now();
        }
        let ticks = (0..2 * COMPUTING).take_while(|_| pulse.hangs(&mut stalled).is_none());
        // The first tick still sees the beat.
        assert_eq!(ticks.count(), ASLEEP as usize);
        let text = pulse.hangs(&mut stalled).unwrap();
        assert!(text.contains("within one step (state S"), "{text}");
        drop(send);
        thread.join().unwrap();
    }
}
