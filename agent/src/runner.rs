//! The core's own thread: events in, plans to the datapath, effects out.
//!
//! ```text
//!  proxies' streams ─► bounded channel ─┐
//!                                       ├─► Core::plan ─► Plan::apply ─► Core::commit ─► Proxies
//!  other rim tasks ──► bounded channel ─┘                (system calls, files)
//! ```
//! A few mappings that arrive while the core is idle need no queue: the thread of their stream
//! carries them out, if none of their steps waits for a disk (`engine::Engine::step_at_once`).
//!
//! A sender waits while its channel is full, so a flood slows only its sender. Events from proxies
//! take priority, even during a policy change. All other events are handled in order, one at a
//! time, after the change. The order of each sender is preserved.

use std::{io, sync::Arc, thread, time::Duration};

use agent_core::{
    core::{
        Core, Directory, EndpointLocation,
        event::Event,
        snapshot::{Snapshot, Summary},
    },
    datapath::plan::Datapath,
};
use dns_policy::boot_time::BootTime;
use tokio::{
    sync::{
        OwnedSemaphorePermit, Semaphore,
        mpsc::{self, error::TrySendError},
        oneshot,
    },
    time::timeout,
};

use crate::{proxies::Proxies, resolver::feed::ResolverFeed};

/// Maximum events in each queue: senders wait while it is full.
const QUEUE: usize = 1024;
/// Maximum total weight ([`weight`]) of the mappings in the queue: some 16,000 small mappings, or about 128 of the
/// largest.
const ROOM: u32 = 1 << 19;
/// Longest time that a reader waits for a snapshot.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(10);

mod engine;
pub(crate) mod identity_feed;
mod merge;
pub(crate) mod pulse;
mod shared;
mod start;

use self::{
    engine::Engine,
    identity_feed::IdentityFeed,
    pulse::Pulse,
    shared::{Queued, Shared},
};

/// A function that reads the core, run on the core's thread.
type Inspection = Box<dyn FnOnce(&Core) + Send>;

#[expect(clippy::large_enum_variant, reason = "nearly every input is an event")]
enum Input {
    Event(Event),
    Snapshot(oneshot::Sender<Snapshot>),
    Summary(oneshot::Sender<Summary>),
    Directory(oneshot::Sender<Directory>),
    Locations(oneshot::Sender<Vec<EndpointLocation>>),
    Inspect(Inspection),
    Stop,
}

/// The core's thread does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CoreAway {
    #[error(
        "the core has stopped: the agent is shutting down, or the core's thread failed (see the log)"
    )]
    Stopped,
    /// The core is busy for too long.
    #[error(
        "the core did not answer within 10 s: it is busy with a large change, or it hangs (see the log)"
    )]
    Slow,
}

/// An event from a proxy's stream, with the room it takes in the queue.
type StreamEvent = (Event, Option<OwnedSemaphorePermit>, Queued);

/// Handle to the core, for every task and thread.
#[derive(Clone, Debug)]
pub struct CoreHandle {
    stream_events: mpsc::Sender<StreamEvent>,
    inputs: mpsc::Sender<Input>,
    room: Arc<Semaphore>,
    shared: Arc<Shared>,
    pulse: Pulse,
}

/// Weight of a queued event. An address, of some 17 bytes, weighs 1; a mapping weighs 32 and its addresses.
fn weight(event: &Event) -> u32 {
    let Event::Mappings(mappings) = event else {
        return 0;
    };
    let addresses = mappings.iter().map(|event| event.mapping.addresses.len());
    let weight = mappings.len() * 32 + addresses.sum::<usize>();
    // An event that is heavier than the whole queue could never be queued.
    u32::try_from(weight).unwrap_or(ROOM).min(ROOM)
}

/// Whether a proxy's stream sends the event. Such events are handled in the order of the stream, before others.
fn is_of_stream(event: &Event) -> bool {
    matches!(
        event,
        Event::Mappings(_)
            | Event::StreamUp(_)
            | Event::StreamDown(_)
            | Event::HolderEnded(_)
            | Event::RevokeAcked(_)
    )
}

impl CoreHandle {
    /// Sends an event to the core. Waits while its queue is full. A sender of mappings waits
    /// behind earlier senders, one batch of each.
    ///
    /// A few mappings that come while the core has nothing to do are carried out here: waking
    /// the core's thread would take longer.
    pub async fn send(&self, event: Event) -> Result<(), CoreAway> {
        let Some(event) = self.shared.step_at_once(event) else {
            return Ok(());
        };
        let weight = weight(&event);
        let room = if weight > 0 {
            let room = Arc::clone(&self.room).acquire_many_owned(weight).await;
            Some(room.map_err(|_| CoreAway::Stopped)?)
        } else {
            None
        };
        if is_of_stream(&event) {
            let sent = self
                .stream_events
                .send((event, room, self.shared.queued()))
                .await;
            return sent.map_err(|_| CoreAway::Stopped);
        }
        let sent = self.inputs.send(Input::Event(event)).await;
        sent.map_err(|_| CoreAway::Stopped)
    }

    /// Whether mappings have to wait before they are queued.
    pub fn is_full(&self) -> bool {
        self.room.available_permits() == 0 || self.stream_events.capacity() == 0
    }

    /// As [`Self::send`], from a thread that may block.
    pub fn send_blocking(&self, event: Event) -> Result<(), CoreAway> {
        let sent = if is_of_stream(&event) {
            let queued = self.shared.queued();
            self.stream_events
                .blocking_send((event, None, queued))
                .is_ok()
        } else {
            self.inputs.blocking_send(Input::Event(event)).is_ok()
        };
        if sent { Ok(()) } else { Err(CoreAway::Stopped) }
    }

    /// The whole state as plain data. The cost grows with the state.
    pub async fn snapshot(&self) -> Result<Snapshot, CoreAway> {
        let (sender, receiver) = oneshot::channel();
        self.request(Input::Snapshot(sender), receiver).await
    }

    /// Counts of the core, without its entries: cheap.
    pub async fn summary(&self) -> Result<Summary, CoreAway> {
        let (sender, receiver) = oneshot::channel();
        self.request(Input::Summary(sender), receiver).await
    }

    /// Endpoints, identities and prefixes. The cost grows with the number of prefixes.
    pub async fn directory(&self) -> Result<Directory, CoreAway> {
        let (sender, receiver) = oneshot::channel();
        self.request(Input::Directory(sender), receiver).await
    }

    /// Where the endpoints are; cheap.
    pub async fn locations(&self) -> Result<Vec<EndpointLocation>, CoreAway> {
        let (sender, receiver) = oneshot::channel();
        self.request(Input::Locations(sender), receiver).await
    }

    /// Runs `inspect` on the core between two events. All events wait for it.
    pub async fn inspect<T: Send + 'static>(
        &self,
        inspect: impl FnOnce(&Core) -> T + Send + 'static,
    ) -> Result<T, CoreAway> {
        let (sender, receiver) = oneshot::channel();
        let inspection = move |core: &Core| {
            let _gone = sender.send(inspect(core));
        };
        self.request(Input::Inspect(Box::new(inspection)), receiver)
            .await
    }

    /// Signs of life of the core's thread.
    pub(crate) fn pulse(&self) -> &Pulse {
        &self.pulse
    }

    /// Starts the thread that ends this process if the core hangs.
    ///
    /// # Errors
    /// The thread could not be started.
    pub(crate) fn end_if_it_hangs(&self) -> io::Result<()> {
        // A strong sender would keep the core from ending.
        let inputs = self.inputs.downgrade();
        self.pulse.watch(move || {
            let nothing: Inspection = Box::new(|_| {});
            inputs.upgrade().is_some_and(|inputs| {
                let sent = inputs.try_send(Input::Inspect(nothing));
                !matches!(sent, Err(TrySendError::Closed(_)))
            })
        })
    }

    /// Returns when the core's thread has ended.
    pub async fn closed(&self) {
        self.inputs.closed().await;
    }

    async fn request<T>(&self, input: Input, answer: oneshot::Receiver<T>) -> Result<T, CoreAway> {
        timeout(SNAPSHOT_TIMEOUT, async {
            self.inputs
                .send(input)
                .await
                .map_err(|_| CoreAway::Stopped)?;
            answer.await.map_err(|_| CoreAway::Stopped)
        })
        .await
        .map_err(|_| CoreAway::Slow)?
    }
}

/// The thread; stopping it leaves the datapath as it is.
#[derive(Debug)]
pub struct CoreThread {
    inputs: mpsc::Sender<Input>,
    thread: thread::JoinHandle<()>,
}

impl CoreThread {
    /// Lets the core handle the events in its queues, and waits until it has ended.
    pub async fn stop(self) {
        let _gone = self.inputs.send(Input::Stop).await;
        drop(self.inputs);
        let joined = tokio::task::spawn_blocking(move || self.thread.join()).await;
        if !matches!(joined, Ok(Ok(()))) {
            tracing::error!("the core's thread panicked");
        }
    }
}

/// Where the core's events come in.
#[derive(Debug)]
pub struct Inbox {
    stream_events: mpsc::Receiver<StreamEvent>,
    inputs: mpsc::Receiver<Input>,
}

/// A handle to a core that is not started yet: events wait until it starts.
pub fn channel() -> (CoreHandle, Inbox) {
    let (stream_events, receiver) = mpsc::channel(QUEUE);
    let (inputs, takes) = mpsc::channel(QUEUE);
    let room = Arc::new(Semaphore::new(ROOM as usize));
    let shared = Arc::new(Shared::default());
    let handle = CoreHandle {
        stream_events,
        inputs,
        room,
        shared,
        pulse: Pulse::default(),
    };
    let inbox = Inbox {
        stream_events: receiver,
        inputs: takes,
    };
    (handle, inbox)
}

/// What the core gives to tasks that it never waits for.
#[derive(Debug, Default)]
pub struct Feeds {
    pub resolver: ResolverFeed,
    pub identities: IdentityFeed,
}

/// Starts the core on a thread of its own.
pub fn start(
    (handle, inbox): (CoreHandle, Inbox),
    core: Core,
    datapath: Box<dyn Datapath>,
    proxies: Proxies,
    feeds: Feeds,
) -> io::Result<(CoreHandle, CoreThread)> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()?;
    let shared = Arc::clone(&handle.shared);
    shared.begin(Engine::new(core, datapath, proxies, feeds));
    let mut runner = Runner {
        inbox,
        owner: Owner(shared),
        pulse: handle.pulse.clone(),
    };
    let thread = thread::Builder::new()
        .name("core".to_owned())
        .spawn(move || runtime.block_on(runner.run()))?;
    let inputs = handle.inputs.clone();
    Ok((handle, CoreThread { inputs, thread }))
}

struct Runner {
    /// Dropped before the engine: a thread of the datapath may still wait to send to this inbox.
    inbox: Inbox,
    owner: Owner,
    pulse: Pulse,
}

/// Drops the core and its datapath when the core's thread ends, although other threads still refer to the engine.
struct Owner(Arc<Shared>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Runner {
    async fn run(&mut self) {
        self.pulse.is_of_this_thread();
        let mut events = Vec::new();
        loop {
            let input = self.wait(&mut events).await;
            self.pulse.begin();
            let mut engine = self.owner.0.lock();
            let Some(engine) = engine.as_mut().filter(|engine| !engine.broken) else {
                return;
            };
            engine.finish_planned();
            let is_busy = input.is_some() || !events.is_empty();
            merge::merged(events.drain(..), |event| engine.step(event));
            if engine.core.change_in_progress() {
                engine.step(Event::ContinueChange);
            }
            if let Some(input) = input {
                while engine.core.change_in_progress() {
                    self.pulse.beat();
                    engine.step(Event::ContinueChange);
                }
                if !take(engine, input) {
                    return;
                }
            }
            let due = match is_busy {
                true => engine.core.next_urgent(),
                false => engine.core.next_deadline(),
            };
            if due.is_some_and(|at| at <= BootTime::now()) {
                engine.step(Event::Tick);
            }
            if !engine.core.change_in_progress() {
                engine.reconcile();
            }
        }
    }

    /// Waits until there is something to do. Fills `events`. Returns an input unless a change of
    /// policy is under way.
    async fn wait(&mut self, events: &mut Vec<StreamEvent>) -> Option<Input> {
        let shared = &self.owner.0;
        let Inbox {
            stream_events: receiver,
            inputs,
        } = &mut self.inbox;
        let mut input = None;
        if let Some(wakes_at) = shared.rest() {
            let left = |at: BootTime| {
                Duration::from_nanos(at.nanos().saturating_sub(BootTime::now().nanos()))
            };
            let wait = wakes_at.map(left);
            let woken = async {
                tokio::select! {
                    Some(first) = receiver.recv() => {
                        events.push(first);
                        None
                    }
                    () = shared.woken() => None,
                    // No sender is left that could stop the core: stop now.
                    input = inputs.recv() => Some(input.unwrap_or(Input::Stop)),
                }
            };
            self.pulse.rest();
            input = match wait {
                Some(wait) => timeout(wait, woken).await.unwrap_or_default(),
                None => woken.await,
            };
            if input.is_none() {
                input = inputs.try_recv().ok();
            }
        }
        // Takes all events that were sent before the input: they are handled first.
        while events.len() <= QUEUE
            && let Ok(next) = receiver.try_recv()
        {
            events.push(next);
        }
        input
    }
}

/// False if the core is to stop.
fn take(engine: &mut Engine, input: Input) -> bool {
    match input {
        Input::Event(event) => engine.step(event),
        Input::Snapshot(answer) => {
            let _gone = answer.send(engine.core.snapshot());
        }
        Input::Summary(answer) => {
            let _gone = answer.send(engine.core.summary());
        }
        Input::Directory(answer) => {
            let _gone = answer.send(engine.core.directory());
        }
        Input::Locations(answer) => {
            let _gone = answer.send(engine.core.locations());
        }
        Input::Inspect(inspection) => inspection(&engine.core),
        Input::Stop => return false,
    }
    true
}
