//! What a relay counts, and its `/metrics`, `/healthz` and `/readyz`.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use daemon::{
    families,
    http_server::{self, Admission, OPENMETRICS, Socket, TEXT},
    metrics::{Counts, Families},
};
use http_body_util::Full;
use hyper::{Request, Response, StatusCode, body::Bytes};
use prometheus_client::{collector::Collector, encoding::DescriptorEncoder, registry::Registry};
use tokio::net::TcpListener;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::serve::Shared;
use crate::{health::WatchHealth, relay_refusal::Refusal};

/// Counters of the relay's service since its start.
#[derive(Debug, Default)]
pub(super) struct Counters {
    /// Snapshots that were begun for agents.
    pub(super) snapshots: AtomicU64,
    /// Snapshots for agents that were too far behind. They count in `snapshots` too.
    pub(super) resynced: AtomicU64,
    /// Agents that were cut off.
    pub(super) cut: AtomicU64,
    /// Bytes of frames, before TLS.
    pub(super) bytes: AtomicU64,
    /// Peers that were not served.
    pub(super) refused: Counts<Refusal>,
}

/// The relay's figures at one moment, as `/metrics` shows them.
#[derive(Clone, Debug, Default)]
pub struct Scrape {
    pub agents: usize,
    /// Changes of objects since the start.
    pub changes: u64,
    counters: Arc<Counters>,
    /// Since when renewed certificates cannot be used, seconds.
    pub certificates_stale: u64,
    pub watches: Vec<WatchHealth>,
}

impl Scrape {
    fn of(shared: &Shared) -> Self {
        Self {
            agents: shared.agents(),
            changes: shared.sequence(),
            counters: Arc::clone(&shared.counters),
            certificates_stale: shared.certificates.seconds(),
            watches: shared.health.watches(),
        }
    }

    fn write(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let counters = &self.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let watches = || self.watches.iter();
        families! { out;
            /// Agents that are connected to this relay now
            gauge relay_agents = self.agents;
            /// Changes of the cluster's objects that this relay sends to its agents
            counter relay_changes = self.changes;
            /// Times that the relay sent all objects to an agent, because the agent was new or had
            /// been disconnected for too long
            counter relay_snapshots = read(&counters.snapshots);
            /// Times that the relay sent all objects again to a connected agent, because the agent
            /// had read too few changes
            counter relay_agents_resynced = read(&counters.resynced);
            /// Agents that the relay disconnected, because they read nothing for 30 seconds
            counter relay_agents_cut = read(&counters.cut);
            /// Connections and requests that this relay refused or ended, by reason
            counter_by relay_refused = |refusal| counters.refused.get(refusal);
            /// Seconds for which the files of --tls-cert, --tls-key and --client-ca have not been
            /// usable; 0 while they are usable. The relay meanwhile uses the files that it read
            /// last
            gauge relay_certificates_stale_seconds = self.certificates_stale;
            /// Bytes that this relay sent to agents, counted before encryption
            counter relay_sent_bytes = read(&counters.bytes);
            /// Objects of the cluster that this relay has
            gauges kubernetes_objects["kind"] = watches().map(|watch| (&watch.kind, watch.objects));
            /// Seconds since a watch of this relay stopped following the API server; 0 while it
            /// follows
            gauges kubernetes_watch_stale_seconds["kind"] =
                watches().map(|watch| (&watch.kind, watch.stale_seconds));
        }
    }

    /// As Prometheus text.
    ///
    /// # Errors
    /// The text cannot be written.
    pub fn text(self) -> Result<String, fmt::Error> {
        let mut registry = Registry::with_prefix("holdfast");
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry)?;
        Ok(text)
    }
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.write(&mut Families(&mut encoder))
    }
}

/// Serves `/metrics`, `/healthz` and `/readyz` until stopped.
pub(super) async fn serve(
    shared: Arc<Shared>,
    listener: TcpListener,
    tasks: TaskTracker,
    stop: CancellationToken,
) {
    let service = move |request: Request<_>| {
        let response = answer(&shared, &request);
        async move { response }
    };
    let socket = Socket::Tcp(listener);
    http_server::serve(socket, Admission::default(), service, tasks, stop).await;
}

fn answer(shared: &Shared, request: &Request<hyper::body::Incoming>) -> Response<Full<Bytes>> {
    let text = |status, text: &'static str| http_server::answer(status, TEXT, text);
    match request.uri().path() {
        "/metrics" => match Scrape::of(shared).text() {
            Ok(metrics) => http_server::answer(StatusCode::OK, OPENMETRICS, metrics),
            Err(_) => text(
                StatusCode::INTERNAL_SERVER_ERROR,
                "the metrics cannot be written\n",
            ),
        },
        "/healthz" => text(StatusCode::OK, "ok\n"),
        "/readyz" => match shared.awaited() {
            None => text(
                StatusCode::OK,
                "ready: every kind of object has been read\n",
            ),
            Some(awaited) => http_server::answer(
                StatusCode::SERVICE_UNAVAILABLE,
                TEXT,
                format!("not ready: {awaited}\n"),
            ),
        },
        _ => text(
            StatusCode::NOT_FOUND,
            "there is /metrics, /healthz and /readyz\n",
        ),
    }
}
