//! Starts a relay, or an agent's connection to relays.

use std::{
    hash::{BuildHasher as _, RandomState},
    io,
    sync::Arc,
    time::Duration,
};

use agent_core::{high_scale::scope::PodScope, policy::source::cluster::Batch};
use anyhow::{Context as _, Result};
use daemon::{descriptors::Descriptors, http_server};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::{mpsc, watch},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    bounds::Bounds,
    connections::Connections,
    credentials::Credentials,
    follow::Follower,
    metrics,
    record::{self, Item},
    renewal,
    serve::Shared,
};
use crate::{
    Here, Watches,
    api::{
        client::Api,
        start::{report, watch_all, write_own_node},
    },
    health::ClusterHealth,
    refusals::Refusals,
    relay_settings::{RelayConfig, RelaySettings},
    resource::watched,
};

/// Batches of a relay that wait for the documents' task.
const QUEUE: usize = 8;
/// Maximum number of batches of watches that the relay takes from the queue together.
const BATCHES: usize = 64;
/// Longest time for tasks to stop.
const GRACE: Duration = Duration::from_secs(5);

/// Follows relays in the place of the agent's own watches. The agent still writes the object about its node. Refused
/// objects are reported by the relays.
pub fn follow(
    api: &Api,
    settings: RelaySettings,
    here: Here,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) -> Watches {
    let health = ClusterHealth::new(api.server(), here.resources).through(&settings.addresses);
    let (send, batches) = mpsc::channel(QUEUE);
    let follower = Follower {
        settings,
        node: here.node.clone(),
        health: health.clone(),
        send,
        resources: here.resources,
        has_service_blocks: here.has_service_blocks,
        pods: here.pods,
        tasks: tasks.clone(),
        renewal: renewal::EVERY,
    };
    tasks.spawn(follower.run(stop.clone()));
    if !here.reads_only {
        write_own_node(api, (here.node, here.high_scale), &health, tasks, stop);
    }
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
    let descriptors = Descriptors::raise();
    let api = Api::connect(&config.kubernetes).await?;
    let tasks = TaskTracker::new();
    let stop = CancellationToken::new();
    let listener = bind(&config, "--listen").await?;
    let metrics_listener = http_server::bind_metrics(&config.metrics_address).await?;
    let credentials = credentials(&config)?;
    tracing::info!(?config, "relay starting");
    let resources = watched(config.has_identities, config.has_world_cidrs);
    let health = ClusterHealth::new(api.server(), resources);
    let mut bounds = Bounds::agents(config.agents_max);
    bounds.agents = descriptors.connections(bounds.agents, bounds.other_descriptors());
    let shared = Shared::new(epoch(), bounds, health, tasks.clone(), stop.clone());
    let shared = Arc::new(shared);
    let here = Here {
        node: config.name.clone(),
        high_scale: None,
        resources,
        reads_only: false,
        has_service_blocks: config.has_service_blocks,
        // A relay sends all pods. Each agent drops the pods that it does not read.
        pods: PodScope::All,
    };
    let batches = watch_all(&api, &here, &shared.health, record::read, &tasks, &stop);
    let refusals = report(&api, &here.node, &shared.health, &tasks, &stop);
    tasks.spawn(feed(Arc::clone(&shared), batches, refusals, stop.clone()));
    if let Some(listener) = metrics_listener {
        let served = metrics::serve(Arc::clone(&shared), listener, tasks.clone(), stop.clone());
        tasks.spawn(served);
    }
    let current = match (credentials, config.tls) {
        (Some(credentials), Some(files)) => {
            let (send, current) = watch::channel(Arc::new(credentials));
            let stale = shared.certificates.clone();
            let report = move |problem| stale.set(problem);
            let renewed = renewal::follow(files, send, report, renewal::EVERY, tasks.clone());
            tasks.spawn(stop.clone().run_until_cancelled_owned(renewed));
            Some(current)
        }
        _ => None,
    };
    let connections = Connections::new(shared, current, tasks.clone(), stop.clone());
    let served = tasks.spawn(connections.serve(listener));
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        ended = served => ended.context("the task that accepts connections panicked (a bug)")?,
    }
    tracing::info!("stopping; agents keep what they have, and connect to another relay");
    stop.cancel();
    tasks.close();
    // Connections of agents that do not close them end with the process.
    let _late = tokio::time::timeout(GRACE, tasks.wait()).await;
    Ok(())
}

/// Certificates, if the configuration has them.
fn credentials(config: &RelayConfig) -> Result<Option<Credentials>> {
    let read = config.tls.as_ref().map(Credentials::load).transpose();
    read.context("--tls-cert, --tls-key or --client-ca cannot be used")
}

async fn bind(config: &RelayConfig, flag: &str) -> Result<TcpListener> {
    let bound = TcpListener::bind(config.listen).await;
    bound.map_err(|error: io::Error| {
        let address = config.listen;
        anyhow::anyhow!("{flag} {address}: {error}; choose another, or stop what has it")
    })
}

/// A random identifier of this run: positions of another run mean nothing to it.
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
        let receipt = batches.recv_many(&mut received, BATCHES);
        if let None | Some(0) = stop.run_until_cancelled(receipt).await {
            return;
        }
        shared.take(received);
        if let Some(refused) = shared.take_refusals() {
            refusals.send_replace(Arc::new(refused));
        }
    }
}
