//! Cilium's service for a standalone DNS proxy (`standalonednsproxy.FQDNData`), with what clients
//! written for Cilium's agent need.
//!
//! The protocol has neither revisions nor deltas: for each change the agent sends a whole snapshot.
//! One snapshot is in flight at a time, and at most one is sent per second. The protocol has no
//! message that removes a rule, so the agent sends a rule that matches nothing in its place. If a
//! snapshot is larger than such a proxy can receive, the prefixes that change no decision are
//! omitted. A snapshot that is still too large is counted and not sent: the proxy keeps its present
//! rules.

mod mapping;
mod reports;
mod sent_rules;
mod state;

use std::{io, sync::Arc, time::Duration};

use agent_core::core::Directory;
use daemon::{
    guests::{Activity, Guests},
    peer::Peer as Who,
    tcp_owner::TcpOwners,
};
use dns_policy::boot_time::BootTime;
use fqdn_proto::fqdndata::{
    FqdnMapping, PolicyState, PolicyStateResponse, ResponseCode, UpdateMappingResponse,
    fqdn_data_server::{FqdnData, FqdnDataServer},
};
use parking_lot::Mutex;
use prost::Message as _;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Mutex as AsyncMutex, mpsc, watch},
    time::{Instant, sleep, sleep_until},
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{Request, Response, Status, Streaming};

use self::{reports::Reports, sent_rules::SentRules};
use super::bounded::{Bounded, CONNECTIONS};
use crate::{
    proxies::{Proxies, RulesTable, StreamGuard, StreamKind},
    runner::{CoreAway, CoreHandle},
};

/// Least time between two snapshots, the same as in Cilium's agent.
const PACE: Duration = Duration::from_secs(1);
/// Time without data after which the agent sends a ping. The client sends a ping after 10 s without
/// data, and closes the connection if no reply comes within 1 s. While the agent sends pings, the client sends none.
const PING: Duration = Duration::from_secs(5);
/// Receive limit of the client (grpc-go), bytes, minus a reserve.
const LIMIT: usize = (4 << 20) - 1024;
/// Largest message of a client, bytes: an answer with the most addresses, as text.
const MAX_REQUEST: usize = 1 << 20;
/// Maximum requests of one connection at a time.
const MAX_STREAMS: u32 = 256;
/// Maximum accepted connections that wait for the gRPC server.
const ACCEPTED: usize = 16;
/// Maximum number of times that rules and directory are read for one snapshot, because a change may happen between the
/// two reads. The last pair is sent although the directory may be one change ahead of the rules or behind them.
const TRIES: usize = 2;
/// Maximum number of directories that are read in the time between two snapshots. All streams share them.
const DIRECTORIES: u32 = 2;

/// Timings of the service, and its size limit.
#[derive(Clone, Copy, Debug)]
pub struct Timings {
    /// Least time between two snapshots of a stream.
    pub pace: Duration,
    /// Time between pings of an idle connection.
    pub ping: Duration,
    /// Largest encoded size of a snapshot, bytes.
    pub limit: usize,
}

impl Default for Timings {
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
    timings: Timings,
    sent_rules: Arc<Mutex<SentRules>>,
    directory: Arc<AsyncMutex<Option<DirectoryRead>>>,
    core: CoreHandle,
    proxies: Proxies,
    reports: Arc<Reports>,
    guests: Guests<Who>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

/// The directory, the number of changes before it, and when it was requested.
#[derive(Clone, Debug)]
struct DirectoryRead {
    change: u64,
    at: Instant,
    directory: Arc<Directory>,
}

impl FqdnDataService {
    /// Starts to handle reports. Snapshots are made of the rules in `proxies` and the directory of
    /// `core`. The tasks of the service run on `tasks` until `stop`.
    pub async fn start(
        core: CoreHandle,
        proxies: Proxies,
        max_delay: Duration,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        let (reports, results) = Reports::start(core.clone(), proxies.clone(), max_delay).await;
        let reports = Arc::new(reports);
        let dispatching = Arc::clone(&reports);
        let dispatching = async move { dispatching.dispatch(results).await };
        tasks.spawn(stop.clone().run_until_cancelled_owned(dispatching));
        Self {
            timings: Timings::default(),
            sent_rules: Arc::default(),
            directory: Arc::default(),
            core,
            proxies,
            reports,
            guests: Guests::new(CONNECTIONS),
            tasks,
            stop,
        }
    }

    /// This service with another limit on connections.
    #[must_use]
    pub fn with_guests(self, guests: Guests<Who>) -> Self {
        Self { guests, ..self }
    }

    #[must_use]
    pub fn with_timings(self, timings: Timings) -> Self {
        Self { timings, ..self }
    }

    /// Serves connections of `listener` until stopped.
    pub async fn serve(self, listener: TcpListener) {
        let stop = self.stop.clone();
        let (sender, incoming) = mpsc::channel::<Incoming>(ACCEPTED);
        let accepting = accept(listener, self.guests.clone(), sender);
        self.tasks
            .spawn(stop.clone().run_until_cancelled_owned(accepting));
        let served = tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(self.timings.ping))
            .http2_keepalive_timeout(Some(PING))
            .max_concurrent_streams(Some(MAX_STREAMS))
            .add_service(FqdnDataServer::new(self).max_decoding_message_size(MAX_REQUEST))
            .serve_with_incoming_shutdown(ReceiverStream::new(incoming), stop.cancelled_owned())
            .await;
        if let Err(error) = served {
            tracing::error!(%error, "the FQDNData server stopped");
        }
    }

    async fn stream(
        self,
        view: StreamGuard,
        mut acks: Streaming<PolicyStateResponse>,
        out: mpsc::Sender<Result<PolicyState, Status>>,
    ) {
        let mut rules = self.proxies.watch_rules();
        let mut changes = self.proxies.watch_changes();
        let mut sent: Option<PolicyState> = None;
        loop {
            let Ok((table, directory)) = self.read_rules(&mut rules, &mut changes).await else {
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
                // The client's answer proves receipt only. Without it, no further snapshot is sent.
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
                () = sleep(self.timings.pace) => {}
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

    /// The rules, and the directory that they refer to.
    async fn read_rules(
        &self,
        rules: &mut watch::Receiver<Arc<RulesTable>>,
        changes: &mut watch::Receiver<u64>,
    ) -> Result<(Arc<RulesTable>, Arc<Directory>), CoreAway> {
        let mut tries = 0;
        loop {
            let change = *changes.borrow_and_update();
            let read = self.directory(change).await?;
            let table = Arc::clone(&rules.borrow_and_update());
            tries += 1;
            // The core publishes rules after the change that they refer to.
            if *changes.borrow() == read.change || tries == TRIES {
                return Ok((table, read.directory));
            }
        }
    }

    /// The next snapshot; `None` if it is the same as `sent`, or larger than the limit.
    fn snapshot(
        &self,
        table: &RulesTable,
        directory: &Directory,
        sent: Option<&PolicyState>,
    ) -> Option<PolicyState> {
        let limit = self.timings.limit;
        let mut state = state::build(
            table,
            directory,
            &mut self.sent_rules.lock(),
            BootTime::now(),
        );
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
                "the snapshot of rules is larger than the proxy can receive; the proxy keeps its present rules"
            );
            return None;
        }
        Some(state)
    }

    /// The directory after this change, or after a later one. One stream requests the directory, and the others share
    /// it, because its cost for the core grows with the number of prefixes.
    async fn directory(&self, change: u64) -> Result<DirectoryRead, CoreAway> {
        let mut last = self.directory.lock().await;
        if let Some(read) = &*last {
            if read.change >= change {
                return Ok(read.clone());
            }
            sleep_until(read.at + self.timings.pace / DIRECTORIES).await;
        }
        let (change, at) = (*self.proxies.watch_changes().borrow(), Instant::now());
        let directory = Arc::new(self.core.directory().await?);
        let read = DirectoryRead {
            change,
            at,
            directory,
        };
        *last = Some(read.clone());
        Ok(read)
    }
}

type Incoming = io::Result<Bounded<TcpStream, Client>>;

/// The other end of a connection.
#[derive(Clone, Debug)]
struct Client {
    who: Who,
    activity: Activity,
}

async fn accept(listener: TcpListener, guests: Guests<Who>, sender: mpsc::Sender<Incoming>) {
    let owners = TcpOwners::open().inspect_err(|error| {
        tracing::warn!(%error, "cannot find the users of connections: all of them share one limit");
    });
    let owners = owners.ok();
    let failed =
        |error: io::Error| tracing::warn!(%error, "cannot accept a connection of FQDNData");
    loop {
        let (stream, from) = guests.accept(|| listener.accept(), failed).await;
        // DNS answers wait for each small message of these connections.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "a connection ended before it was served");
            continue;
        }
        let who = match (&owners, stream.local_addr()) {
            (Some(owners), Ok(to)) => Who::of_loopback(owners, from, to),
            _ => Who::of_address(from.ip()),
        };
        let guest = guests.admit(who);
        let activity = guest.activity();
        let connection = Bounded::new(stream, Client { who, activity }, guest);
        if sender.send(Ok(connection)).await.is_err() {
            return;
        }
    }
}

fn client<T>(request: &Request<T>) -> Client {
    let client = request.extensions().get::<Client>().cloned();
    client.unwrap_or_else(|| Client {
        who: Who::Unnamed,
        activity: Activity::default(),
    })
}

#[tonic::async_trait]
impl FqdnData for FqdnDataService {
    type StreamPolicyStateStream = ReceiverStream<Result<PolicyState, Status>>;

    async fn stream_policy_state(
        &self,
        request: Request<Streaming<PolicyStateResponse>>,
    ) -> Result<Response<Self::StreamPolicyStateStream>, Status> {
        let client = client(&request);
        let view = self
            .proxies
            .admit(StreamKind::FqdnData, "fqdndata-rules", None, client.who)
            .ok_or_else(|| Status::unavailable("too many streams; close some"))?;
        let (sender, receiver) = mpsc::channel(1);
        let serving = self.clone().stream(view, request.into_inner(), sender);
        let busy = client.activity.busy();
        self.tasks.spawn(async move {
            serving.await;
            drop(busy);
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn update_mapping_request(
        &self,
        request: Request<FqdnMapping>,
    ) -> Result<Response<UpdateMappingResponse>, Status> {
        let _busy = client(&request).activity.busy();
        self.reports.learn(&request.into_inner()).await?;
        Ok(Response::new(UpdateMappingResponse {
            response: ResponseCode::NoError.into(),
        }))
    }
}
