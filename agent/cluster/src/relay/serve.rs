//! Serves the record to agents, one task for each.
//!
//! An agent has a position in the changes that all agents share, and two frames that wait for its
//! connection. An agent that reads slowly delays no other agent. Once its position is older than the oldest change, it
//! gets a snapshot. If that snapshot is outdated before the agent has read all of it, the agent gets a newer one. The
//! stream of an agent ends if its connection accepts nothing for a time ([`Bounds::slow`]).

use std::{
    convert::Infallible,
    pin::pin,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use agent_core::policy::source::cluster::Batch;
use fqdn_proto::{
    frames::{EncodedFrame, Follow, part, position},
    relay::{FollowRequest, Hello, Position, Stale, Step, View, step},
};
use parking_lot::Mutex;
use prost::bytes::Bytes;
use tokio::{
    sync::{mpsc, watch},
    time::MissedTickBehavior,
};
use tokio_stream::{Once, StreamExt as _, adapters::Chain, wrappers::ReceiverStream};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{Request, Status};

use super::{
    bounds::Bounds,
    connections::Connection,
    metrics::Counters,
    paced::Paced,
    places::{NoPlace, Place, Places},
    record::{Item, Record, Snapshot},
    renewal,
};
use crate::health::ClusterHealth;
use crate::relay_refusal::Refusal;

/// Frames that wait for a connection.
const QUEUE: usize = 2;
/// A connection that accepts fewer bytes in [`Bounds::slow`] counts as one that accepts nothing: answers to pings are
/// smaller.
const SLOW_BYTES: u64 = 1 << 10;
/// An agent that reads a snapshot begins again when there are this many newer ones, so that memory
/// holds at most this many snapshots besides the last.
const SNAPSHOTS: u64 = 2;
/// Time between two *views*, the reports of how current the relay's objects are. An agent that gets no view connects to
/// another relay.
const VIEW: Duration = Duration::from_secs(5);
/// Maximum length of a node's name in the log, in bytes: names of Kubernetes are not longer.
const NAME_MAX: usize = 253;

/// State of the relay that all streams share.
#[derive(Debug)]
pub(super) struct Shared {
    record: Mutex<Record>,
    /// Position after the last change.
    sequence: watch::Sender<u64>,
    epoch: String,
    places: Places,
    pub(super) health: ClusterHealth,
    pub(super) counters: Arc<Counters>,
    pub(super) certificates: renewal::Stale,
    bounds: Bounds,
    connected: Paced,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl Shared {
    /// A relay without objects. No other run has the same `epoch`.
    pub(super) fn new(
        epoch: String,
        bounds: Bounds,
        health: ClusterHealth,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        Self {
            record: Mutex::new(Record::new(health.kinds())),
            sequence: watch::Sender::new(0),
            epoch,
            places: Places::new(bounds.agents),
            health,
            counters: Arc::default(),
            certificates: renewal::Stale::default(),
            bounds,
            connected: Paced::default(),
            tasks,
            stop,
        }
    }

    /// Takes what the watches saw.
    pub(super) fn take(&self, batches: Vec<Batch<Item>>) {
        let mut record = self.record.lock();
        for batch in batches {
            let kind = batch.kind;
            record.take(batch);
            self.health.set_objects(kind, record.count(kind));
        }
        let sequence = record.sequence();
        drop(record);
        self.sequence.send_replace(sequence);
    }

    pub(super) fn bounds(&self) -> &Bounds {
        &self.bounds
    }

    /// Tasks that end with the relay.
    #[cfg(test)]
    pub(super) fn tasks(&self) -> &TaskTracker {
        &self.tasks
    }

    pub(super) fn agents(&self) -> usize {
        self.places.taken()
    }

    /// See [`Record::take_refusals`].
    pub(super) fn take_refusals(&self) -> Option<crate::refusals::Refusals> {
        self.record.lock().take_refusals()
    }

    /// Position after the last change, which is the number of changes since the start.
    pub(super) fn sequence(&self) -> u64 {
        *self.sequence.borrow()
    }

    /// Why agents cannot be served yet; `None` = they can.
    pub(super) fn awaited(&self) -> Option<String> {
        let kind = self.record.lock().awaited()?;
        let watches = self.health.watches();
        let watch = watches.iter().find(|watch| watch.kind == kind);
        let reason = watch.and_then(|watch| watch.reason.as_deref());
        Some(match reason {
            Some(reason) => format!("{kind} is not read yet: {reason}"),
            None => format!("{kind} is not read yet"),
        })
    }

    fn hello(&self, continues: bool) -> Bytes {
        let kinds = self.health.kinds().map(str::to_owned);
        part_of(step::Step::Hello(Hello {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            epoch: self.epoch.clone(),
            kinds: kinds.collect(),
            continues,
        }))
    }

    fn view(&self) -> Bytes {
        let watches = self.health.watches().into_iter();
        let stale = watches.filter_map(|watch| {
            Some(Stale {
                kind: watch.kind,
                seconds: watch.stale_seconds,
                reason: watch.reason?,
            })
        });
        part_of(step::Step::View(View {
            stale: stale.collect(),
        }))
    }

    /// Sends to one agent until it is gone.
    async fn serve(&self, agent: &mut Agent, after: Option<u64>) -> Result<Infallible, Ended> {
        let mut changes = self.sequence.subscribe();
        let mut views = tokio::time::interval(VIEW);
        views.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut at = match after {
            Some(sequence) => {
                agent.send(self, vec![self.hello(true)]).await?;
                sequence
            }
            None => self.send_snapshot(agent).await?,
        };
        loop {
            changes.borrow_and_update();
            let portion = self.record.lock().after(at);
            match portion {
                Err(_) => {
                    self.counters.resynced.fetch_add(1, Ordering::Relaxed);
                    at = self.send_snapshot(agent).await?;
                }
                Ok(portion) if portion.parts.is_empty() => tokio::select! {
                    changed = changes.changed() => if changed.is_err() {
                        return Err(Ended::Gone);
                    },
                    _ = views.tick() => agent.send(self, vec![self.view()]).await?,
                    () = self.stop.cancelled() => return Err(Ended::Stopping),
                    () = agent.place.lost().cancelled() => return Err(Ended::Displaced),
                    () = agent.out.closed() => return Err(Ended::Gone),
                },
                Ok(portion) => {
                    let mut parts = portion.parts;
                    parts.push(position(portion.sequence));
                    agent.send(self, parts).await?;
                    at = portion.sequence;
                }
            }
        }
    }

    /// Sends a snapshot. Gives the position of the changes that follow it.
    async fn send_snapshot(&self, agent: &mut Agent) -> Result<u64, Ended> {
        loop {
            let snapshot = self.record.lock().snapshot();
            self.counters.snapshots.fetch_add(1, Ordering::Relaxed);
            if self.send_frames(agent, &snapshot).await? == Sent::All {
                let parts = vec![self.view(), position(snapshot.sequence)];
                agent.send(self, parts).await?;
                return Ok(snapshot.sequence);
            }
            self.counters.resynced.fetch_add(1, Ordering::Relaxed);
        }
    }

    async fn send_frames(&self, agent: &mut Agent, snapshot: &Snapshot) -> Result<Sent, Ended> {
        agent.send(self, vec![self.hello(false)]).await?;
        let is_outdated = || self.record.lock().newer(snapshot) >= SNAPSHOTS;
        for frame in &snapshot.frames {
            let parts = vec![frame.clone()];
            if agent.send_unless(self, parts, is_outdated).await? == Sent::Outdated {
                return Ok(Sent::Outdated);
            }
        }
        Ok(Sent::All)
    }
}

/// Whether an agent got the parts that were to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sent {
    All,
    /// The parts waited so long that they are outdated.
    Outdated,
}

/// What a stream carries: frames, and at last the status that ends it.
type Frame = Result<EncodedFrame, Status>;

/// Why the stream of an agent ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    /// The agent closed the stream.
    Gone,
    /// The agent read nothing for too long.
    Slow,
    /// An agent with another certificate has its place.
    Displaced,
    Stopping,
}

impl Ended {
    fn status(self) -> Status {
        match self {
            Self::Slow => Status::aborted("the agent reads too slowly and was cut off"),
            Self::Displaced => Status::resource_exhausted(
                "the relay is full, and an agent with another certificate has this agent's place; add \
                 a relay, or raise its --max-agents",
            ),
            Self::Gone | Self::Stopping => Status::unavailable("the relay stops"),
        }
    }
}

/// The stream to one agent.
#[derive(Debug)]
struct Agent {
    out: mpsc::Sender<Frame>,
    connection: Arc<Connection>,
    place: Place,
}

impl Agent {
    async fn send(&mut self, shared: &Shared, parts: Vec<Bytes>) -> Result<(), Ended> {
        self.send_unless(shared, parts, || false).await.map(drop)
    }

    /// Sends the parts, unless they become outdated. Waits as long as the connection takes bytes.
    async fn send_unless(
        &mut self,
        shared: &Shared,
        parts: Vec<Bytes>,
        is_outdated: impl Fn() -> bool,
    ) -> Result<Sent, Ended> {
        let bytes: usize = parts.iter().map(Bytes::len).sum();
        let mut reserved = pin!(self.out.reserve());
        let permit = loop {
            if is_outdated() {
                return Ok(Sent::Outdated);
            }
            let before = self.connection.progress.written();
            tokio::select! {
                permit = &mut reserved => break permit.map_err(|_| Ended::Gone)?,
                () = tokio::time::sleep(shared.bounds.slow) => {}
                () = shared.stop.cancelled() => return Err(Ended::Stopping),
                () = self.place.lost().cancelled() => return Err(Ended::Displaced),
            }
            if self.connection.progress.written() - before < SLOW_BYTES {
                return Err(Ended::Slow);
            }
        };
        permit.send(Ok(EncodedFrame(parts)));
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        shared.counters.bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(Sent::All)
    }
}

/// The gRPC service of the relay.
#[derive(Clone, Debug)]
pub(super) struct Service(pub(super) Arc<Shared>);

impl Service {
    fn place(&self, connection: &Connection) -> Result<Place, Status> {
        let shared = &self.0;
        let who = connection.who;
        shared.places.admit(who).map_err(|none| {
            shared.counters.refused.inc(Refusal::Agents);
            let limit = shared.places.limit();
            Status::resource_exhausted(match none {
                NoPlace::Full => format!(
                    "the relay serves {limit} agents already; add a relay, or raise its --max-agents"
                ),
                NoPlace::Share { held } => format!(
                    "the relay serves {held} agents of {} already, and other addresses need the \
                     remaining places; add a relay, or raise its --max-agents (now {limit})",
                    who.address
                ),
            })
        })
    }

    /// Where the agent continues; `None` = it begins with a snapshot.
    fn continues(&self, after: Option<Position>) -> Option<u64> {
        let shared = &self.0;
        let position = after.filter(|after| after.epoch == shared.epoch);
        let sequence = position.map(|position| position.sequence);
        sequence.filter(|sequence| shared.record.lock().reaches(*sequence))
    }
}

impl Follow for Service {
    type Frames = Chain<ReceiverStream<Frame>, Once<Frame>>;

    fn follow(&self, request: Request<FollowRequest>) -> Result<Self::Frames, Status> {
        let shared = &self.0;
        if let Some(awaited) = shared.awaited() {
            return Err(Status::unavailable(format!(
                "the relay is not ready: {awaited}"
            )));
        }
        let connection = request.extensions().get::<Arc<Connection>>().cloned();
        let connection = connection.ok_or_else(|| Status::internal("no connection (a bug)"))?;
        let place = self.place(&connection)?;
        let request = request.into_inner();
        let sequence = self.continues(request.after);
        let mut node = request.node;
        node.truncate(node.floor_char_boundary(NAME_MAX));
        let mut version = request.version;
        version.truncate(version.floor_char_boundary(NAME_MAX));
        let peer = connection.peer;
        if let Some(left_out) = shared.connected.line(Instant::now()) {
            let continues = sequence.is_some();
            tracing::info!(%peer, node, version, continues, left_out, "agent connected");
        }
        let (out, frames) = mpsc::channel(QUEUE + 1);
        // Room for the status that ends the stream, even when the agent takes no frames.
        let end = out.clone().try_reserve_owned();
        let end = end.map_err(|_| Status::internal("no room in an empty queue (a bug)"))?;
        let shared = Arc::clone(shared);
        let streaming = connection.stream();
        self.0.tasks.spawn(async move {
            let mut agent = Agent {
                out,
                connection,
                place,
            };
            let Err(ended) = shared.serve(&mut agent, sequence).await;
            end.send(Err(ended.status()));
            if ended == Ended::Slow {
                shared.counters.cut.fetch_add(1, Ordering::Relaxed);
                let slow = shared.bounds.slow;
                tracing::warn!(%peer, node, "agent cut off: it read nothing for {slow:?}");
            }
            drop(agent);
            drop(streaming);
        });
        // Frames that end without a status are those of a task that panicked.
        let last = tokio_stream::once(Err(Ended::Stopping.status()));
        Ok(ReceiverStream::new(frames).chain(last))
    }
}

fn part_of(step: step::Step) -> Bytes {
    part(Step { step: Some(step) })
}

#[cfg(test)]
#[path = "serve_tests.rs"]
mod tests;
