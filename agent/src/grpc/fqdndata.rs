//! Cilium's service for a standalone DNS proxy (`standalonednsproxy.FQDNData`),
//! so that Cilium's proxy runs beneath this agent.
//!
//! It has neither revisions nor deltas: each change is a whole snapshot, one
//! in flight, at most one per second. It cannot say "no rules any more"
//! either: a rule that nothing matches stands for that. A snapshot larger than
//! such a proxy can receive goes without the prefixes that decide nothing; one
//! that is too large even so is counted, and the proxy keeps what it has.

mod given;
mod mapping;
mod state;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use fqdn_proto::fqdndata::{
    FqdnMapping, PolicyState, PolicyStateResponse, ResponseCode, UpdateMappingResponse,
    fqdn_data_server::{FqdnData, FqdnDataServer},
};
use holdfast_sdp::mapping::{BootTime, Realised};
use parking_lot::Mutex;
use prost::Message as _;
use tokio::{
    net::TcpListener,
    sync::{mpsc, oneshot, watch},
    time::{sleep, timeout},
};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{Request, Response, Status, Streaming};

use self::given::Given;
use crate::{
    core::{
        Directory, Place,
        event::{Event, MappingEvent},
    },
    proxies::{Proxies, Results, RulesTable, StreamGuard, StreamKind, ToStream},
    runner::{CoreAway, CoreHandle},
};

/// Between two snapshots, as Cilium's agent paces them.
const PACE: Duration = Duration::from_secs(1);
/// The client drops a connection that is silent for 10 s unless a ping is
/// answered within 1 s; pings of ours every 5 s keep it from asking.
const PING: Duration = Duration::from_secs(5);
/// Receive limit of the client (grpc-go), bytes, less some room.
const LIMIT: usize = (4 << 20) - 1024;
/// Largest message of a client: the answer with most addresses, as text.
const MAX_REQUEST: usize = 1 << 20;
/// Requests of one connection at a time.
const MAX_STREAMS: u32 = 256;
/// Looks until rules and directory are of one time, while much is learned.
const TRIES: usize = 5;
/// Requests of all connections that may wait for their result.
const MAX_WAITING: usize = 16_384;
/// How long the result of a mapping may take beyond the response max delay.
const MARGIN: Duration = Duration::from_millis(50);

/// How the service treats its clients.
#[derive(Clone, Copy, Debug)]
pub struct Manners {
    /// Least time between two snapshots of a stream.
    pub pace: Duration,
    /// Time between pings of an idle connection.
    pub ping: Duration,
    /// Largest snapshot, bytes.
    pub limit: usize,
}

impl Default for Manners {
    fn default() -> Self {
        Self {
            pace: PACE,
            ping: PING,
            limit: LIMIT,
        }
    }
}

/// The service. Clones share their state.
#[derive(Clone, Debug)]
pub struct FqdnDataService {
    manners: Manners,
    given: Arc<Mutex<Given>>,
    directory: Arc<Mutex<Option<Seen>>>,
    core: CoreHandle,
    proxies: Proxies,
    waiting: Arc<Waiting>,
    places: Arc<Mutex<Option<Known>>>,
    guard: Arc<StreamGuard>,
    max_delay: Duration,
    tasks: TaskTracker,
    stop: CancellationToken,
}

/// Requests without a result yet.
#[derive(Debug, Default)]
struct Waiting(Mutex<(u64, BTreeMap<u64, oneshot::Sender<Realised>>)>);

impl Waiting {
    /// Enters a request; none if too many wait.
    fn enter(self: &Arc<Self>) -> Option<(Waiter, oneshot::Receiver<Realised>)> {
        let mut waiting = self.0.lock();
        if waiting.1.len() >= MAX_WAITING {
            return None;
        }
        waiting.0 += 1;
        let sequence = waiting.0;
        let (sender, receiver) = oneshot::channel();
        waiting.1.insert(sequence, sender);
        let waiting = Arc::clone(self);
        Some((Waiter { sequence, waiting }, receiver))
    }
}

/// A request that waits; its client may give up at any time.
struct Waiter {
    sequence: u64,
    waiting: Arc<Waiting>,
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.waiting.0.lock().1.remove(&self.sequence);
    }
}

/// The directory, and after how many changes.
type Seen = (u64, Arc<Directory>);

/// The endpoints and until when they are taken for current.
type Known = (BootTime, Arc<Vec<Place>>);

impl FqdnDataService {
    /// With what it serves from; its tasks run on `tasks` until `stop`.
    pub async fn start(
        core: CoreHandle,
        proxies: Proxies,
        max_delay: Duration,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        let (guard, results) = proxies.open_results(StreamKind::FqdnData, "fqdndata", None);
        let _stopped = core.tell(Event::StreamUp(guard.id())).await;
        let service = Self {
            manners: Manners::default(),
            given: Arc::default(),
            directory: Arc::default(),
            core,
            proxies,
            waiting: Arc::default(),
            places: Arc::default(),
            guard: Arc::new(guard),
            max_delay,
            tasks,
            stop,
        };
        let dispatching = service.clone();
        service.tasks.spawn(dispatching.dispatch(results));
        service
    }

    /// With other manners.
    #[must_use]
    pub fn with_manners(self, manners: Manners) -> Self {
        Self { manners, ..self }
    }

    /// Serves connections of `listener` until stopped.
    pub async fn serve(self, listener: TcpListener) {
        let stop = self.stop.clone();
        let served = tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(self.manners.ping))
            .http2_keepalive_timeout(Some(PING))
            .max_concurrent_streams(Some(MAX_STREAMS))
            .add_service(FqdnDataServer::new(self).max_decoding_message_size(MAX_REQUEST))
            .serve_with_incoming_shutdown(TcpListenerStream::new(listener), stop.cancelled_owned())
            .await;
        if let Err(error) = served {
            tracing::error!(%error, "the FQDNData server ended");
        }
    }

    async fn dispatch(self, mut results: Results) {
        loop {
            let message = tokio::select! {
                message = results.recv() => message,
                () = self.stop.cancelled() => return,
            };
            match message {
                Some(ToStream::Outcomes(outcomes)) => {
                    let mut waiting = self.waiting.0.lock();
                    for outcome in outcomes {
                        if let Some(waiter) = waiting.1.remove(&outcome.sequence) {
                            let _gone = waiter.send(outcome.realised);
                        }
                    }
                }
                // These clients hold no leases.
                Some(ToStream::Revoke(revocation)) => {
                    let event = Event::RevokeAcked {
                        stream: self.guard.id(),
                        id: revocation.id,
                    };
                    if self.core.tell(event).await.is_err() {
                        return;
                    }
                }
                None => return,
            }
        }
    }

    async fn stream(
        self,
        mut acks: Streaming<PolicyStateResponse>,
        out: mpsc::Sender<Result<PolicyState, Status>>,
    ) {
        let view = self
            .proxies
            .open(StreamKind::FqdnData, "fqdndata-rules", None);
        let mut rules = self.proxies.watch_rules();
        let mut changes = self.proxies.watch_changes();
        let mut sent: Option<PolicyState> = None;
        loop {
            let Ok((table, directory)) = self.look(&mut rules, &mut changes).await else {
                return;
            };
            let next = if table.ready {
                self.snapshot(&table, &directory, sent.as_ref())
            } else {
                None
            };
            if let Some(mut state) = next {
                state.request_id = format!("{}-{}", table.revision, view.id().0);
                if out.send(Ok(state.clone())).await.is_err() {
                    return;
                }
                view.sent(table.revision);
                // Its answer proves receipt only; without one nothing more is sent.
                let ack = tokio::select! {
                    ack = acks.message() => ack,
                    () = self.stop.cancelled() => return,
                };
                if !matches!(ack, Ok(Some(_))) {
                    return;
                }
                view.acked(table.revision);
                sent = Some(state);
            }
            tokio::select! {
                () = sleep(self.manners.pace) => {}
                () = self.stop.cancelled() => return,
                () = out.closed() => return,
            }
            let changed = tokio::select! {
                changed = rules.changed() => changed,
                changed = changes.changed() => changed,
                () = self.stop.cancelled() => return,
                () = out.closed() => return,
            };
            if changed.is_err() {
                return;
            }
        }
    }

    /// Rules, and the directory that they lean on.
    async fn look(
        &self,
        rules: &mut watch::Receiver<Arc<RulesTable>>,
        changes: &mut watch::Receiver<u64>,
    ) -> Result<(Arc<RulesTable>, Arc<Directory>), CoreAway> {
        let mut tries = 0;
        loop {
            let change = *changes.borrow_and_update();
            let directory = self.directory(change).await?;
            let table = Arc::clone(&rules.borrow_and_update());
            tries += 1;
            // Rules come after the change that they lean on.
            if *changes.borrow() == change || tries == TRIES {
                return Ok((table, directory));
            }
        }
    }

    /// What to send, if it says anything new and can be received.
    fn snapshot(
        &self,
        table: &RulesTable,
        directory: &Directory,
        sent: Option<&PolicyState>,
    ) -> Option<PolicyState> {
        let limit = self.manners.limit;
        let mut state = state::build(table, directory, &mut self.given.lock(), BootTime::now());
        if state.encoded_len() > limit {
            state::shrink(&mut state, directory);
        }
        if sent.is_some_and(|sent| state::same(sent, &state)) {
            return None;
        }
        let size = state.encoded_len();
        if size > limit {
            self.proxies.add_oversized();
            tracing::error!(
                size,
                limit,
                "the snapshot is larger than the proxy can receive; it keeps what it has"
            );
            return None;
        }
        Some(state)
    }

    /// Who is where, asked for once per change whatever number of streams there is.
    async fn directory(&self, change: u64) -> Result<Arc<Directory>, CoreAway> {
        if let Some((known, directory)) = &*self.directory.lock()
            && *known == change
        {
            return Ok(Arc::clone(directory));
        }
        let directory = Arc::new(self.core.directory().await?);
        *self.directory.lock() = Some((change, Arc::clone(&directory)));
        Ok(directory)
    }

    /// Endpoints as they were at most a second ago: asking per answer would hold it up twice.
    async fn places(&self) -> Result<Arc<Vec<Place>>, CoreAway> {
        let now = BootTime::now();
        if let Some((until, places)) = &*self.places.lock()
            && *until > now
        {
            return Ok(Arc::clone(places));
        }
        let places = Arc::new(self.core.places().await?);
        *self.places.lock() = Some((now.plus(PACE), Arc::clone(&places)));
        Ok(places)
    }

    async fn learn(&self, request: FqdnMapping) -> Result<(), Status> {
        if !mapping::is_answer(&request) {
            return Ok(());
        }
        let places = self
            .places()
            .await
            .map_err(|away| Status::unavailable(away.to_string()))?;
        let Some(mapping) = mapping::read(&request, &places)? else {
            return Ok(());
        };
        let Some((waiter, receiver)) = self.waiting.enter() else {
            return Err(Status::unavailable("too many answers wait for the agent"));
        };
        let event = MappingEvent {
            stream: self.guard.id(),
            sequence: waiter.sequence,
            mapping,
        };
        let told = self.core.tell(Event::Mappings(vec![event])).await;
        let outcome = match told {
            Ok(()) => timeout(self.max_delay + MARGIN, receiver).await,
            Err(away) => return Err(Status::unavailable(away.to_string())),
        };
        drop(waiter);
        match outcome {
            Ok(Ok(Realised::Yes)) => Ok(()),
            Ok(Ok(realised)) => Err(Status::unknown(format!("not realised: {realised:?}"))),
            Ok(Err(_)) | Err(_) => Err(Status::unavailable("not realised in time")),
        }
    }
}

#[tonic::async_trait]
impl FqdnData for FqdnDataService {
    type StreamPolicyStateStream = ReceiverStream<Result<PolicyState, Status>>;

    async fn stream_policy_state(
        &self,
        request: Request<Streaming<PolicyStateResponse>>,
    ) -> Result<Response<Self::StreamPolicyStateStream>, Status> {
        if self.proxies.is_crowded() {
            return Err(Status::unavailable("too many streams; close some"));
        }
        let (sender, receiver) = mpsc::channel(1);
        self.tasks
            .spawn(self.clone().stream(request.into_inner(), sender));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn update_mapping_request(
        &self,
        request: Request<FqdnMapping>,
    ) -> Result<Response<UpdateMappingResponse>, Status> {
        self.learn(request.into_inner()).await?;
        Ok(Response::new(UpdateMappingResponse {
            response: ResponseCode::NoError.into(),
        }))
    }
}
