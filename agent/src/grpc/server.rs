//! The native service (`holdfast.fqdn.v1`) on its unix socket.

use std::{path::PathBuf, sync::Arc, time::Duration};

use daemon::{
    guests::{Busy, Guests},
    peer::Peer as Who,
    state_dir::StateDir,
};
use dns_policy::epoch::Epoch;
use fqdn_proto::native::{
    DnsRulesUpdate, HelloRequest, HelloResponse, MappingDown, MappingUp, RulesAck,
    fqdn_policy_server::{FqdnPolicy, FqdnPolicyServer},
};
use tokio::{net::UnixListener, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{Request, Response, Status, Streaming};

use super::{
    bounded::CONNECTIONS,
    convert,
    holder::Holders,
    mappings,
    peer::{Allowed, Checked, Peer, ProxyConnection},
    rules,
};
use crate::{
    proxies::{Proxies, StreamGuard, StreamKind},
    runner::CoreHandle,
};

/// Maximum messages between a stream's task and HTTP/2. The stream's task makes the next message when there is room.
const IN_FLIGHT: usize = 4;
/// Maximum connections that wait for the server.
const ACCEPTED: usize = 16;
/// Maximum requests of one connection at a time. A proxy has two streams, and a request now and then.
const REQUESTS: u32 = 256;
/// A proxy that does not answer a ping for this long is gone.
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// What the service reports about this agent.
#[derive(Clone, Debug)]
pub struct About {
    pub epoch: Epoch,
    /// Port that DNS is redirected to.
    pub proxy_port: u16,
    /// Shortest time for which a learned address is valid, in seconds.
    pub min_ttl: u32,
    /// Directory of this agent's files.
    pub state_dir: PathBuf,
}

/// The native service, which serves mapping and rules streams of proxies.
#[derive(Clone, Debug)]
pub struct Native {
    about: Arc<About>,
    core: CoreHandle,
    proxies: Proxies,
    holders: Holders,
    guests: Guests<Who>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl Native {
    /// Makes the service; its tasks run on `tasks` until `stop`.
    pub fn new(
        about: About,
        core: CoreHandle,
        proxies: Proxies,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        Self {
            about: Arc::new(about),
            holders: Holders::default(),
            core,
            proxies,
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

    /// Serves connections of `listener` until stopped.
    pub async fn serve(self, listener: UnixListener, allowed: Allowed) {
        let (sender, incoming) = mpsc::channel::<Incoming>(ACCEPTED);
        let stop = self.stop.clone();
        let holders = self.holders.clone();
        self.tasks
            .spawn(holders.run(self.core.clone(), stop.clone()));
        let accepting = accept(listener, allowed, self.guests.clone(), sender);
        self.tasks
            .spawn(stop.clone().run_until_cancelled_owned(accepting));
        let served = tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(PING_TIMEOUT))
            .http2_keepalive_timeout(Some(PING_TIMEOUT))
            .max_concurrent_streams(Some(REQUESTS))
            .add_service(FqdnPolicyServer::new(self))
            .serve_with_incoming_shutdown(ReceiverStream::new(incoming), stop.cancelled_owned())
            .await;
        if let Err(error) = served {
            tracing::error!(%error, "the gRPC server stopped");
        }
    }

    fn admit(&self, kind: StreamKind, peer: &Peer) -> Result<StreamGuard, Status> {
        let (instance, pid) = (peer.instance(), peer.visible_pid());
        let guard = self.proxies.admit(kind, &instance, pid, peer.who);
        let guard = guard.ok_or_else(|| {
            Status::resource_exhausted("too many streams, of this process or in all; close some")
        })?;
        guard.has_other_state_dir(peer.other_state_dir());
        Ok(guard)
    }
}

type Incoming = std::io::Result<ProxyConnection>;

async fn accept(
    listener: UnixListener,
    allowed: Allowed,
    guests: Guests<Who>,
    sender: mpsc::Sender<Incoming>,
) {
    let failed =
        |error: std::io::Error| tracing::warn!(%error, "cannot accept a proxy's connection");
    loop {
        let (stream, _) = guests.accept(|| listener.accept(), failed).await;
        match Checked::new(stream, allowed).and_then(|checked| checked.admit(&guests)) {
            Ok(connection) => {
                if sender.send(Ok(connection)).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                guests.reject();
                tracing::warn!(%error, "connection to the gRPC socket refused");
            }
        }
    }
}

fn peer<T>(request: &Request<T>) -> Peer {
    request
        .extensions()
        .get::<Peer>()
        .cloned()
        .unwrap_or_default()
}

/// The connection is busy until `serving` ends.
async fn during(busy: Busy, serving: impl Future<Output = ()>) {
    serving.await;
    drop(busy);
}

#[tonic::async_trait]
impl FqdnPolicy for Native {
    async fn hello(
        &self,
        request: Request<HelloRequest>,
    ) -> Result<Response<HelloResponse>, Status> {
        let peer = peer(&request);
        let _busy = peer.activity.busy();
        let hello = request.into_inner();
        peer.named(&hello.instance);
        let expected = u32::from(self.about.proxy_port);
        if hello.proxy_port != expected {
            tracing::warn!(
                instance = %peer.instance(), its_port = hello.proxy_port, our_port = expected,
                "the proxy listens on a port to which DNS is not redirected; give agent and proxy the same --tofqdns-proxy-port"
            );
        }
        let own = StateDir::look(&self.about.state_dir);
        let its = hello.state_dir.map(convert::state_dir);
        if let Some(its) = its.filter(|its| own.differs_from(its)) {
            peer.has_state_dir(&its.path);
            tracing::warn!(
                instance = %peer.instance(), its = %its.path.display(), ours = %own.path.display(),
                "the proxy looks for the agent's files in another directory; give agent and proxy the same --state-dir"
            );
        }
        tracing::info!(instance = %peer.instance(), version = %hello.version, "proxy connected");
        Ok(Response::new(HelloResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            capabilities: Vec::new(),
            epoch: Some(convert::epoch(&self.about.epoch)),
            revision: self.proxies.watch_rules().borrow().revision,
            proxy_port: expected,
            min_ttl: self.about.min_ttl,
            state_dir: Some(convert::to_state_dir(&own)),
        }))
    }

    type UpdateMappingsStream = ReceiverStream<Result<MappingDown, Status>>;

    async fn update_mappings(
        &self,
        request: Request<Streaming<MappingUp>>,
    ) -> Result<Response<Self::UpdateMappingsStream>, Status> {
        let peer = peer(&request);
        let guard = self.admit(StreamKind::Mappings, &peer)?;
        let results = guard.results();
        if let (Some(pid), Some(process)) = (peer.pid, peer.process) {
            self.holders.follow(pid, process, guard.id());
        }
        let (sender, receiver) = mpsc::channel(IN_FLIGHT);
        let serving = mappings::serve(
            self.core.clone(),
            self.about.epoch.clone(),
            guard,
            results,
            request.into_inner(),
            sender,
            self.stop.child_token(),
        );
        self.tasks.spawn(during(peer.activity.busy(), serving));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    type UpdateDNSRulesStream = ReceiverStream<Result<DnsRulesUpdate, Status>>;

    async fn update_dns_rules(
        &self,
        request: Request<Streaming<RulesAck>>,
    ) -> Result<Response<Self::UpdateDNSRulesStream>, Status> {
        let peer = peer(&request);
        let guard = self.admit(StreamKind::Rules, &peer)?;
        let (sender, receiver) = mpsc::channel(IN_FLIGHT);
        let serving = rules::serve(
            self.about.epoch.clone(),
            guard,
            self.proxies.watch_rules(),
            request.into_inner(),
            sender,
            self.stop.child_token(),
        );
        self.tasks.spawn(during(peer.activity.busy(), serving));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}
