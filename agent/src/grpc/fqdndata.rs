//! Cilium's service for a standalone DNS proxy (`standalonednsproxy.FQDNData`),
//! so that Cilium's proxy runs beneath this agent.
//!
//! It has neither revisions nor deltas: each change is a whole snapshot, one
//! in flight, at most one per second. It cannot say "no rules any more"
//! either: a rule that nothing matches stands for that.

mod mapping;
mod state;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use fqdn_proto::fqdndata::{
    FqdnMapping, PolicyState, PolicyStateResponse, ResponseCode, UpdateMappingResponse,
    fqdn_data_server::{FqdnData, FqdnDataServer},
};
use holdfast_sdp::mapping::{BootTime, Realised};
use parking_lot::Mutex;
use prost::Message as _;
use tokio::{
    net::TcpListener,
    sync::{mpsc, oneshot},
    time::{MissedTickBehavior, interval, timeout},
};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{Request, Response, Status, Streaming};

use self::state::RuleKey;
use crate::{
    core::{
        Place,
        event::{Event, MappingEvent},
    },
    proxies::{Proxies, StreamGuard, StreamKind, ToStream},
    runner::{CoreAway, CoreHandle},
};

/// Between two snapshots, as Cilium's agent paces them.
const PACE: Duration = Duration::from_secs(1);
/// The client drops a connection that is silent for 10 s unless a ping is
/// answered within 1 s; pings of ours every 5 s keep it from asking.
const PING: Duration = Duration::from_secs(5);
/// Receive limit of the client (grpc-go), bytes, less some room.
const LIMIT: usize = (4 << 20) - 1024;
/// How long the result of a mapping may take beyond the response max delay.
const MARGIN: Duration = Duration::from_millis(50);

/// The service. Clones share their state.
#[derive(Clone, Debug)]
pub struct FqdnDataService {
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

    /// Serves connections of `listener` until stopped.
    pub async fn serve(self, listener: TcpListener) {
        let stop = self.stop.clone();
        let served = tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(PING))
            .http2_keepalive_timeout(Some(PING))
            .add_service(FqdnDataServer::new(self))
            .serve_with_incoming_shutdown(TcpListenerStream::new(listener), stop.cancelled_owned())
            .await;
        if let Err(error) = served {
            tracing::error!(%error, "the FQDNData server ended");
        }
    }

    async fn dispatch(self, mut results: mpsc::Receiver<ToStream>) {
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
        let mut pace = interval(PACE);
        pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut rules = self.proxies.watch_rules();
        let mut sent: Option<PolicyState> = None;
        let mut known: BTreeSet<RuleKey> = BTreeSet::new();
        loop {
            tokio::select! {
                _ = pace.tick() => {}
                () = self.stop.cancelled() => return,
                () = out.closed() => return,
            }
            let table = Arc::clone(&rules.borrow_and_update());
            if !table.ready {
                continue;
            }
            let Ok(directory) = self.core.directory().await else {
                return;
            };
            let mut state = state::build(&table, &directory, &mut known);
            if sent.as_ref().is_some_and(|sent| state::same(sent, &state)) {
                continue;
            }
            state.request_id = format!("{}-{}", table.revision, view.id().0);
            let size = state.encoded_len();
            if size > LIMIT {
                tracing::error!(
                    size,
                    LIMIT,
                    "the snapshot is larger than the proxy can receive; it keeps what it has"
                );
                continue;
            }
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
        let (sender, receiver) = oneshot::channel();
        let sequence = {
            let mut waiting = self.waiting.0.lock();
            waiting.0 += 1;
            let sequence = waiting.0;
            waiting.1.insert(sequence, sender);
            sequence
        };
        let event = MappingEvent {
            stream: self.guard.id(),
            sequence,
            mapping,
        };
        let told = self.core.tell(Event::Mappings(vec![event])).await;
        let outcome = match told {
            Ok(()) => timeout(self.max_delay + MARGIN, receiver).await,
            Err(away) => return Err(Status::unavailable(away.to_string())),
        };
        self.waiting.0.lock().1.remove(&sequence);
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
