//! Starts a relay, or an agent's connection to relays.

use std::{
    hash::{BuildHasher as _, RandomState},
    io,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result};
use fqdn_proto::frames::RelayServer;
use holdfast_sdp::descriptors::Descriptors;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::{mpsc, watch},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::transport::{Certificate, Identity, Server, ServerTlsConfig, server::TcpIncoming};

use super::{
    follow::Follower,
    metrics,
    record::{self, Item},
    serve::{Bounds, Service, Shared},
    settings::{RelayConfig, RelaySettings},
};
use crate::{
    kubernetes::{
        Here, Watches,
        client::Api,
        health::ClusterHealth,
        refusals::Refusals,
        start::{report, watch_all, write_own_node},
    },
    policy::source::cluster::Batch,
};

/// Batches of a relay that wait for the documents' task.
const QUEUE: usize = 8;
/// Batches of watches that are recorded at once.
const BATCHES: usize = 64;
/// An agent that does not answer a ping for this long is gone.
const PING: Duration = Duration::from_secs(20);
/// Streams of one connection: an agent has one.
const STREAMS: u32 = 4;
/// Longest time for a handshake of TLS: a connection without a certificate holds a descriptor so
/// long.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Longest time for tasks to stop.
const GRACE: Duration = Duration::from_secs(5);

/// Follows relays in the place of the watches. The object about this node is written as always;
/// relays report refused objects.
pub(crate) fn follow(
    api: &Api,
    settings: RelaySettings,
    here: Here,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) -> Watches {
    let health = ClusterHealth::new(api.server());
    let (send, batches) = mpsc::channel(QUEUE);
    let follower = Follower {
        settings,
        node: here.node.clone(),
        health: health.clone(),
        send,
        has_service_blocks: here.has_service_blocks,
    };
    tasks.spawn(follower.run(stop.clone()));
    write_own_node(api, here.node, &health, tasks, stop);
    Watches {
        batches,
        health,
        refusals: watch::channel(Arc::<Refusals>::default()).0,
    }
}

/// Runs a relay until SIGTERM or SIGINT.
///
/// # Errors
/// An address or a file cannot be used, or the API server does not accept the relay.
pub async fn run(config: RelayConfig) -> Result<()> {
    Descriptors::raise();
    let api = Api::connect(&config.kubernetes).await?;
    let tasks = TaskTracker::new();
    let stop = CancellationToken::new();
    let listener = bind(&config, "--listen").await?;
    let metrics_listener = match config.metrics_address {
        Some(address) => Some(
            crate::health::bind(address)
                .await
                .map_err(anyhow::Error::msg)?,
        ),
        None => None,
    };
    let mut server = server(&config)?;
    tracing::info!(?config, "relay starting");
    let health = ClusterHealth::new(api.server());
    let bounds = Bounds::agents(config.agents_max);
    let shared = Shared::new(epoch(), bounds, health, tasks.clone(), stop.clone());
    let shared = Arc::new(shared);
    let here = Here {
        node: config.name.clone(),
        has_service_blocks: config.has_service_blocks,
    };
    let batches = watch_all(&api, &here, &shared.health, record::read, &tasks, &stop);
    let refusals = report(&api, &here.node, &shared.health, &tasks, &stop);
    tasks.spawn(feed(Arc::clone(&shared), batches, refusals, stop.clone()));
    if let Some(listener) = metrics_listener {
        let served = metrics::serve(Arc::clone(&shared), listener, tasks.clone(), stop.clone());
        tasks.spawn(served);
    }
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    let served = server
        .add_service(RelayServer::new(Service(shared)))
        .serve_with_incoming_shutdown(incoming, stop.clone().cancelled_owned());
    let served = tasks.spawn(served);
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        ended = served => {
            ended.context("the gRPC server panicked (a bug)")?.context("the gRPC server")?;
        }
    }
    tracing::info!("stopping; agents keep what they have, and connect to another relay");
    stop.cancel();
    tasks.close();
    // Connections of agents that do not close them end with the process.
    let _late = tokio::time::timeout(GRACE, tasks.wait()).await;
    Ok(())
}

/// The gRPC server, with TLS if the configuration has certificates.
fn server(config: &RelayConfig) -> Result<Server> {
    let server = Server::builder()
        .http2_keepalive_interval(Some(PING))
        .http2_keepalive_timeout(Some(PING))
        .max_concurrent_streams(Some(STREAMS));
    let Some(files) = &config.tls else {
        return Ok(server);
    };
    let texts = files.read()?;
    let tls = ServerTlsConfig::new()
        .identity(Identity::from_pem(texts.certificate, texts.key))
        .client_ca_root(Certificate::from_pem(texts.authority))
        .timeout(HANDSHAKE);
    server
        .tls_config(tls)
        .context("the certificates cannot be used; correct --tls-cert, --tls-key and --client-ca")
}

async fn bind(config: &RelayConfig, flag: &str) -> Result<TcpListener> {
    let bound = TcpListener::bind(config.listen).await;
    bound.map_err(|error: io::Error| {
        let address = config.listen;
        anyhow::anyhow!("{flag} {address}: {error}; choose another, or stop what has it")
    })
}

/// Of this run alone.
fn epoch() -> String {
    let random = RandomState::new().hash_one(std::process::id());
    format!("{random:016x}")
}

/// Records what the watches see, until the relay stops.
async fn feed(
    shared: Arc<Shared>,
    mut batches: mpsc::Receiver<Batch<Item>>,
    refusals: watch::Sender<Arc<Refusals>>,
    stop: CancellationToken,
) {
    loop {
        let mut received = Vec::new();
        let count = tokio::select! {
            count = batches.recv_many(&mut received, BATCHES) => count,
            () = stop.cancelled() => return,
        };
        if count == 0 {
            return;
        }
        shared.take(received);
        if let Some(refused) = shared.take_refusals() {
            refusals.send_replace(Arc::new(refused));
        }
    }
}
