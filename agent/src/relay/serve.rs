//! Serves the record to agents, one task for each.
//!
//! An agent has a position in the changes that all share, and two frames that wait for its
//! connection. One that reads slowly delays no other: once its position is older than the oldest
//! change, it gets a snapshot; if it takes no frame for [`SLOW`], its stream ends.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use fqdn_proto::{
    frames::{EncodedFrame, Follow, part, position},
    relay::{FollowRequest, Hello, Stale, Step, View, step},
};
use parking_lot::Mutex;
use prost::bytes::Bytes;
use tokio::{
    sync::{mpsc, watch},
    time::MissedTickBehavior,
};
use tokio_stream::Stream;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{Request, Status};

use super::{
    metrics::Counters,
    record::{Item, Record},
};
use crate::{
    kubernetes::{health::ClusterHealth, resource::RESOURCES},
    policy::source::cluster::Batch,
};

/// Frames that wait for a connection.
const QUEUE: usize = 2;
/// An agent that takes no frame for so long is cut off.
const SLOW: Duration = Duration::from_secs(30);
/// Between two views: an agent that gets none connects to another relay.
const VIEW: Duration = Duration::from_secs(5);

/// What all agents share.
#[derive(Debug)]
pub(super) struct Shared {
    record: Mutex<Record>,
    /// Position after the last change.
    sequence: watch::Sender<u64>,
    epoch: String,
    agents_max: usize,
    pub(super) health: ClusterHealth,
    pub(super) counters: Counters,
    slow: Duration,
    tasks: TaskTracker,
    stop: CancellationToken,
}

/// Bounds of a relay.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Agents at once.
    pub(super) agents: usize,
    /// An agent that takes no frame for so long is cut off.
    pub(super) slow: Duration,
}

impl Bounds {
    /// For so many agents.
    pub(super) fn agents(agents: usize) -> Self {
        Self { agents, slow: SLOW }
    }
}

impl Shared {
    /// Without objects. `epoch` is of this run alone.
    pub(super) fn new(
        epoch: String,
        bounds: Bounds,
        health: ClusterHealth,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        let kinds = RESOURCES.iter().map(|resource| resource.kind);
        Self {
            record: Mutex::new(Record::new(kinds)),
            sequence: watch::Sender::new(0),
            epoch,
            agents_max: bounds.agents,
            health,
            counters: Counters::default(),
            slow: bounds.slow,
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

    /// See [`Record::take_refusals`].
    pub(super) fn take_refusals(&self) -> Option<crate::kubernetes::refusals::Refusals> {
        self.record.lock().take_refusals()
    }

    /// Changes since the start.
    pub(super) fn sequence(&self) -> u64 {
        *self.sequence.borrow()
    }

    /// Why agents cannot be served yet; none = they can.
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
        let kinds = RESOURCES.iter().map(|resource| resource.kind.to_owned());
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
    async fn serve(&self, agent: &mut Agent, after: Option<u64>) -> Result<(), Ended> {
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

    /// Gives the position of the changes that follow.
    async fn send_snapshot(&self, agent: &mut Agent) -> Result<u64, Ended> {
        let snapshot = self.record.lock().snapshot();
        self.counters.snapshots.fetch_add(1, Ordering::Relaxed);
        agent.send(self, vec![self.hello(false)]).await?;
        for frame in &snapshot.frames {
            agent.send(self, vec![frame.clone()]).await?;
        }
        let parts = vec![self.view(), position(snapshot.sequence)];
        agent.send(self, parts).await?;
        Ok(snapshot.sequence)
    }
}

/// Why a stream ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    /// The agent closed it.
    Gone,
    /// The agent took no frame for too long.
    Slow,
    /// The relay stops.
    Stopping,
}

/// The way to one agent.
#[derive(Debug)]
struct Agent {
    out: mpsc::Sender<EncodedFrame>,
}

impl Agent {
    async fn send(&mut self, shared: &Shared, parts: Vec<Bytes>) -> Result<(), Ended> {
        let octets: usize = parts.iter().map(Bytes::len).sum();
        let sent = self.out.send(EncodedFrame(parts));
        let sent = tokio::select! {
            sent = tokio::time::timeout(shared.slow, sent) => sent,
            () = shared.stop.cancelled() => return Err(Ended::Stopping),
        };
        match sent {
            Ok(Ok(())) => {
                let octets = u64::try_from(octets).unwrap_or(u64::MAX);
                shared.counters.octets.fetch_add(octets, Ordering::Relaxed);
                Ok(())
            }
            Ok(Err(_)) => Err(Ended::Gone),
            Err(_) => Err(Ended::Slow),
        }
    }
}

/// The service.
#[derive(Clone, Debug)]
pub(super) struct Service(pub(super) Arc<Shared>);

impl Follow for Service {
    type Frames = Frames;

    fn follow(&self, request: Request<FollowRequest>) -> Result<Frames, Status> {
        let shared = &self.0;
        if let Some(awaited) = shared.awaited() {
            return Err(Status::unavailable(format!(
                "the relay is not ready: {awaited}"
            )));
        }
        let admitted = shared.counters.admit(shared.agents_max);
        let admitted = admitted.ok_or_else(|| {
            Status::resource_exhausted(format!(
                "the relay serves {} agents already; add a relay, or raise its --max-agents",
                shared.agents_max
            ))
        })?;
        let peer = request.remote_addr().map(|address| address.to_string());
        let peer = peer.unwrap_or_default();
        let request = request.into_inner();
        let position = request.after.filter(|after| after.epoch == shared.epoch);
        let sequence = position.map(|position| position.sequence);
        let sequence = sequence.filter(|sequence| shared.record.lock().reaches(*sequence));
        tracing::info!(
            peer,
            node = request.node,
            version = request.version,
            continues = sequence.is_some(),
            "agent connected"
        );
        let (out, receiver) = mpsc::channel(QUEUE);
        let is_slow = Arc::new(AtomicBool::new(false));
        let frames = Frames {
            receiver,
            is_slow: Arc::clone(&is_slow),
            has_ended: false,
        };
        let (shared, node) = (Arc::clone(shared), request.node);
        self.0.tasks.spawn(async move {
            let mut agent = Agent { out };
            let ended = shared.serve(&mut agent, sequence).await;
            if ended == Err(Ended::Slow) {
                is_slow.store(true, Ordering::Relaxed);
                shared.counters.cut.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(
                    peer,
                    node,
                    "agent cut off: it took no frame for {:?}",
                    shared.slow
                );
            }
            drop(admitted);
        });
        Ok(frames)
    }
}

/// Frames for one agent.
#[derive(Debug)]
pub(super) struct Frames {
    receiver: mpsc::Receiver<EncodedFrame>,
    is_slow: Arc<AtomicBool>,
    has_ended: bool,
}

impl Stream for Frames {
    type Item = Result<EncodedFrame, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.has_ended {
            return Poll::Ready(None);
        }
        let next = self.receiver.poll_recv(context);
        next.map(|next| {
            Some(next.map(Ok).unwrap_or_else(|| {
                self.has_ended = true;
                Err(match self.is_slow.load(Ordering::Relaxed) {
                    true => Status::aborted("the agent reads too slowly and was cut off"),
                    false => Status::unavailable("the relay stops"),
                })
            }))
        })
    }
}

fn part_of(step: step::Step) -> Bytes {
    part(Step { step: Some(step) })
}

#[cfg(test)]
#[path = "serve_tests.rs"]
mod tests;
