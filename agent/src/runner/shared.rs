//! The engine, for the core's thread and for threads of proxies' streams that find it at rest.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use agent_core::core::event::Event;
use dns_policy::boot_time::BootTime;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use super::engine::{AtOnce, Engine};

/// The engine and its lock. Only the core's thread waits for the lock; other threads only try it.
#[derive(Default)]
pub(super) struct Shared {
    engine: Mutex<Option<Engine>>,
    /// Events of streams that the core's thread has not carried out yet.
    queued: Arc<AtomicUsize>,
    wake: Notify,
}

/// Counts an event of a stream while it waits. To be dropped under the engine's lock.
#[derive(Debug)]
pub(super) struct Queued(Arc<AtomicUsize>);

impl Drop for Queued {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Marks the engine if the thread that has it panics.
struct Trial<'a> {
    engine: MutexGuard<'a, Option<Engine>>,
    wake: &'a Notify,
}

impl Drop for Trial<'_> {
    fn drop(&mut self) {
        if thread::panicking()
            && let Some(engine) = self.engine.as_mut()
        {
            engine.broken = true;
            tracing::error!("a step of the core panicked (a bug); the core stops");
            self.wake.notify_one();
        }
    }
}

impl Shared {
    /// Makes the engine available. Before this, events wait.
    pub(super) fn begin(&self, engine: Engine) {
        *self.engine.lock() = Some(engine);
    }

    /// Drops the core and its datapath.
    pub(super) fn end(&self) {
        let engine = self.engine.lock().take();
        drop(engine);
    }

    /// Waits for the engine. Only the core's thread may call this.
    pub(super) fn lock(&self) -> MutexGuard<'_, Option<Engine>> {
        self.engine.lock()
    }

    /// Counts an event that is about to be queued.
    pub(super) fn queued(&self) -> Queued {
        self.queued.fetch_add(1, Ordering::AcqRel);
        Queued(Arc::clone(&self.queued))
    }

    /// To be called before the core's thread sleeps. Gives the time at which the thread has to wake, `Some(None)` if
    /// there is no such time, and `None` if the thread may not sleep.
    pub(super) fn rest(&self) -> Option<Option<BootTime>> {
        let mut engine = self.engine.lock();
        let engine = engine.as_mut()?;
        if engine.core.change_in_progress() {
            return None;
        }
        let deadline = engine.core.next_deadline().into_iter();
        engine.wakes_at = deadline.chain(engine.core.query_due()).min();
        Some(engine.wakes_at)
    }

    /// Returns when a stream's thread left something for the core's thread to do.
    pub(super) async fn woken(&self) {
        self.wake.notified().await;
    }

    /// Carries the event out if the core is at rest and the event takes microseconds. Returns the event if it has to
    /// be queued.
    pub(super) fn step_at_once(&self, event: Event) -> Option<Event> {
        if !matches!(event, Event::Mappings(_)) {
            return Some(event);
        }
        let Some(engine) = self.engine.try_lock() else {
            return Some(event);
        };
        let wake = &self.wake;
        let mut trial = Trial { engine, wake };
        // If a sender has an earlier event in the queue, this event must not overtake it.
        if self.queued.load(Ordering::Acquire) > 0 {
            return Some(event);
        }
        let Some(engine) = trial.engine.as_mut() else {
            return Some(event);
        };
        let (refused, behind) = match engine.step_at_once(event) {
            AtOnce::Refused(event) => return Some(event),
            AtOnce::Planned => (None, true),
            AtOnce::Done => (None, engine.is_behind()),
        };
        if behind {
            wake.notify_one();
        }
        refused
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}
