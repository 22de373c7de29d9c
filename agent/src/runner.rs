//! The core's own thread: events in, plans to the datapath, effects out.
//!
//! ```text
//!  proxies' streams ─► bounded channel ─┐
//!                                       ├─► Core::plan ─► Plan::apply ─► Core::commit ─► Proxies
//!  other rim tasks ──► bounded channel ─┘                (system calls, files)
//! ```
//! Whoever sends waits when its channel is full: a flood slows its sender only. What proxies
//! tell goes first, between two parts of a change of policy too; all else is taken in order,
//! one at a time, and waits for the end of such a change. Nothing overtakes what its sender
//! told before as a proxy.

use std::{io, sync::Arc, thread, time::Duration};

use holdfast_sdp::mapping::BootTime;
use shared_maps::EndpointId;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot},
    time::timeout,
};

use crate::{
    core::{
        Core, Directory, EndpointLocation,
        event::{Effect, Event},
        snapshot::{Snapshot, Summary},
    },
    datapath::{
        look::{ProgramFault, Sight},
        plan::{Datapath, Step},
    },
    proxies::Proxies,
};

/// Events that may wait: at this depth senders wait.
const QUEUE: usize = 1024;
/// What the mappings among them may weigh ([`weight`]): some 16,000 of them, or the addresses
/// of 128 of the largest.
const ROOM: u32 = 1 << 19;
/// Failed steps of one plan that are logged one by one.
const LOGGED: usize = 10;
/// Longest that a reader waits for a snapshot.
const PATIENCE: Duration = Duration::from_secs(10);

mod merge;

/// Looks at the core on its own thread.
type Look = Box<dyn FnOnce(&Core) + Send>;

enum Input {
    Event(Event),
    Snapshot(oneshot::Sender<Snapshot>),
    Summary(oneshot::Sender<Summary>),
    Directory(oneshot::Sender<Directory>),
    Places(oneshot::Sender<Vec<EndpointLocation>>),
    Look(Look),
    Stop,
}

/// The core's thread does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CoreAway {
    /// It has stopped.
    #[error("the core has stopped; the agent is shutting down or its thread died (see the log)")]
    Stopped,
    /// It is busy for too long.
    #[error(
        "the core did not answer within 10 s; it is busy with a large change, or stuck (see the log)"
    )]
    Slow,
}

/// What a proxy's stream tells, with the room it takes in the queue.
type Told = (Event, Option<OwnedSemaphorePermit>);

/// Way to the core, for every task and thread.
#[derive(Clone, Debug)]
pub struct CoreHandle {
    told: mpsc::Sender<Told>,
    inputs: mpsc::Sender<Input>,
    room: Arc<Semaphore>,
}

/// What a queued event costs: an address 17 bytes or so, a mapping as much as 32 of them.
fn weight(event: &Event) -> u32 {
    let Event::Mappings(mappings) = event else {
        return 0;
    };
    let addresses = mappings.iter().map(|event| event.mapping.addresses.len());
    let weight = mappings.len() * 32 + addresses.sum::<usize>();
    // What the queue never has room for would never pass.
    u32::try_from(weight).unwrap_or(ROOM).min(ROOM)
}

/// Whether it is what a proxy's stream tells: in the order of the stream, and soon.
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
    /// Tells the core something. Waits while its queue is full; whoever sends mappings waits
    /// behind those that came before, one batch of each.
    pub async fn tell(&self, event: Event) -> Result<(), CoreAway> {
        let weight = weight(&event);
        let room = if weight > 0 {
            let room = Arc::clone(&self.room).acquire_many_owned(weight).await;
            Some(room.map_err(|_| CoreAway::Stopped)?)
        } else {
            None
        };
        if is_of_stream(&event) {
            let told = self.told.send((event, room)).await;
            return told.map_err(|_| CoreAway::Stopped);
        }
        let told = self.inputs.send(Input::Event(event)).await;
        told.map_err(|_| CoreAway::Stopped)
    }

    /// Whether mappings have to wait before they are queued.
    pub fn is_full(&self) -> bool {
        self.room.available_permits() == 0 || self.told.capacity() == 0
    }

    /// As [`Self::tell`], from a thread that may block.
    pub fn tell_blocking(&self, event: Event) -> Result<(), CoreAway> {
        let told = if is_of_stream(&event) {
            self.told.blocking_send((event, None)).is_ok()
        } else {
            self.inputs.blocking_send(Input::Event(event)).is_ok()
        };
        if told { Ok(()) } else { Err(CoreAway::Stopped) }
    }

    /// The whole state as plain data. Costs as much as there is state.
    pub async fn snapshot(&self) -> Result<Snapshot, CoreAway> {
        let (sender, receiver) = oneshot::channel();
        self.ask(Input::Snapshot(sender), receiver).await
    }

    /// Counts; cheap.
    pub async fn summary(&self) -> Result<Summary, CoreAway> {
        let (sender, receiver) = oneshot::channel();
        self.ask(Input::Summary(sender), receiver).await
    }

    /// Who is where; costs as much as there are prefixes.
    pub async fn directory(&self) -> Result<Directory, CoreAway> {
        let (sender, receiver) = oneshot::channel();
        self.ask(Input::Directory(sender), receiver).await
    }

    /// Where the endpoints are; cheap.
    pub async fn places(&self) -> Result<Vec<EndpointLocation>, CoreAway> {
        let (sender, receiver) = oneshot::channel();
        self.ask(Input::Places(sender), receiver).await
    }

    /// Has `look` look at the core between two events; it holds up everything else.
    pub async fn look<T: Send + 'static>(
        &self,
        look: impl FnOnce(&Core) -> T + Send + 'static,
    ) -> Result<T, CoreAway> {
        let (sender, receiver) = oneshot::channel();
        let look = move |core: &Core| {
            let _gone = sender.send(look(core));
        };
        self.ask(Input::Look(Box::new(look)), receiver).await
    }

    /// Returns when the core's thread has ended.
    pub async fn closed(&self) {
        self.inputs.closed().await;
    }

    async fn ask<T>(&self, input: Input, answer: oneshot::Receiver<T>) -> Result<T, CoreAway> {
        timeout(PATIENCE, async {
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
    /// Lets the core finish what is queued, and waits for it.
    pub async fn stop(self) {
        let _gone = self.inputs.send(Input::Stop).await;
        drop(self.inputs);
        let joined = tokio::task::spawn_blocking(move || self.thread.join()).await;
        if !matches!(joined, Ok(Ok(()))) {
            tracing::error!("the core's thread ended by a panic");
        }
    }
}

/// Where the core's events come in.
#[derive(Debug)]
pub struct Inbox {
    told: mpsc::Receiver<Told>,
    inputs: mpsc::Receiver<Input>,
}

/// A way to a core that is yet to start: what comes meanwhile waits.
pub fn channel() -> (CoreHandle, Inbox) {
    let (told, hears) = mpsc::channel(QUEUE);
    let (inputs, takes) = mpsc::channel(QUEUE);
    let room = Arc::new(Semaphore::new(ROOM as usize));
    let handle = CoreHandle { told, inputs, room };
    let inbox = Inbox {
        told: hears,
        inputs: takes,
    };
    (handle, inbox)
}

/// Starts the core on a thread of its own.
pub fn start(
    (handle, inbox): (CoreHandle, Inbox),
    core: Core,
    datapath: Box<dyn Datapath>,
    proxies: Proxies,
) -> io::Result<(CoreHandle, CoreThread)> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()?;
    let mut runner = Runner {
        core,
        datapath,
        proxies,
        inbox,
    };
    let thread = thread::Builder::new()
        .name("core".to_owned())
        .spawn(move || runtime.block_on(runner.run()))?;
    let inputs = handle.inputs.clone();
    Ok((handle, CoreThread { inputs, thread }))
}

struct Runner {
    core: Core,
    /// Gone before the datapath, whose thread may wait to be heard.
    inbox: Inbox,
    datapath: Box<dyn Datapath>,
    proxies: Proxies,
}

impl Runner {
    async fn run(&mut self) {
        let mut told = Vec::new();
        loop {
            let input = self.wait(&mut told).await;
            self.hear(told.drain(..));
            if self.core.change_in_progress() {
                self.step(Event::ContinueChange);
            } else if input.is_some_and(|input| !self.take(input)) {
                return;
            }
            if self
                .core
                .next_deadline()
                .is_some_and(|at| at <= BootTime::now())
            {
                self.step(Event::Tick);
            }
            if !self.core.change_in_progress() {
                self.reconcile();
            }
        }
    }

    /// Waits until there is something to do. Fills `told`; gives an input unless a change of
    /// policy is under way.
    async fn wait(&mut self, told: &mut Vec<Told>) -> Option<Input> {
        let mut input = None;
        if !self.core.change_in_progress() {
            let deadline = self.core.next_deadline();
            let deadline = deadline.into_iter().chain(self.core.look_due()).min();
            let wait =
                deadline.map(|at| Duration::from_nanos(at.0.saturating_sub(BootTime::now().0)));
            let Inbox {
                told: hears,
                inputs,
            } = &mut self.inbox;
            let woken = async {
                tokio::select! {
                    Some(first) = hears.recv() => {
                        told.push(first);
                        None
                    }
                    // Nobody is left who could stop the core: that stops it.
                    input = inputs.recv() => Some(input.unwrap_or(Input::Stop)),
                }
            };
            input = match wait {
                Some(wait) => timeout(wait, woken).await.unwrap_or_default(),
                None => woken.await,
            };
        }
        if input.is_none() && !self.core.change_in_progress() {
            input = self.inbox.inputs.try_recv().ok();
        }
        // All that was told before the input was.
        while told.len() <= QUEUE
            && let Ok(next) = self.inbox.told.try_recv()
        {
            told.push(next);
        }
        input
    }

    /// Takes what proxies tell, as few events as keep its order.
    fn hear(&mut self, told: impl Iterator<Item = Told>) {
        merge::merged(told, |event| self.step(event));
    }

    /// False if the core is to stop.
    fn take(&mut self, input: Input) -> bool {
        match input {
            Input::Event(event) => self.step(event),
            Input::Snapshot(answer) => {
                let _gone = answer.send(self.core.snapshot());
            }
            Input::Summary(answer) => {
                let _gone = answer.send(self.core.summary());
            }
            Input::Directory(answer) => {
                let _gone = answer.send(self.core.directory());
            }
            Input::Places(answer) => {
                let _gone = answer.send(self.core.places());
            }
            Input::Look(look) => look(&self.core),
            Input::Stop => return false,
        }
        true
    }

    /// Looks at a little of the datapath, if it is the time.
    fn reconcile(&mut self) {
        let Some(look) = self.core.look(BootTime::now()) else {
            return;
        };
        let sight = self.datapath.look(&look);
        match &sight {
            Ok(Sight::Programs(found)) => log_faults(found),
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(%error, "a map could not be compared with what it should hold");
            }
        }
        let differences = self.core.seen(sight.ok());
        if differences > 0 {
            tracing::warn!(
                differences,
                of = look.name(),
                "the datapath is not as it should be: mended"
            );
            self.step(Event::Tick);
        }
    }

    fn step(&mut self, event: Event) {
        let by_source = matches!(
            event,
            Event::Policies(_)
                | Event::ContinueChange
                | Event::Endpoints(_)
                | Event::NodeAddresses(_)
        );
        let plan = self.core.plan(BootTime::now(), event);
        let writes_files_only = plan
            .steps
            .iter()
            .all(|step| matches!(step, Step::WriteEndpoint(..) | Step::KeepNames(..)));
        let failures = plan.apply(&mut *self.datapath);
        for (index, error) in failures.iter().take(LOGGED) {
            let Some(step) = plan.steps.get(*index) else {
                continue;
            };
            let endpoint = step.endpoint().map(|id| id.0);
            let address = step.prefix().map(tracing::field::display);
            tracing::warn!(
                step = step.name(), endpoint, address, %error,
                "a step was not realised; what was in force stays"
            );
        }
        if failures.len() > LOGGED {
            tracing::warn!(
                more = failures.len() - LOGGED,
                "further steps were not realised"
            );
        }
        let effects = self.core.commit(BootTime::now(), plan, &failures);
        if by_source || !writes_files_only {
            // Before the rules that lean on it.
            self.proxies.changed();
        }
        self.publish(effects);
    }

    fn publish(&self, effects: Vec<Effect>) {
        let mut outcomes = Vec::new();
        let mut revocations = Vec::new();
        for effect in effects {
            match effect {
                Effect::Outcome(outcome) => outcomes.push(outcome),
                Effect::Rules(update) => self.proxies.rules(update),
                Effect::SnapshotReady => self.proxies.ready(),
                Effect::Revoke(revocation) => revocations.push(revocation),
            }
        }
        // One message per stream, however many names were cleaned.
        self.proxies.revoke(revocations);
        if !outcomes.is_empty() {
            self.proxies.outcomes(outcomes);
        }
    }
}

fn log_faults(found: &[(EndpointId, Vec<ProgramFault>)]) {
    for (endpoint, faults) in found {
        for fault in faults {
            tracing::warn!(endpoint = endpoint.0, %fault, "programs of an endpoint are not in force");
        }
    }
}
