//! What a relay counts, and its `/metrics`, `/healthz` and `/readyz`.

use std::sync::{
    Arc,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};

use daemon::http_server::{self, Limits, Socket};
use http_body_util::Full;
use hyper::{Request, Response, StatusCode, body::Bytes, header::CONTENT_TYPE};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::{Registry, Unit},
};
use tokio::net::TcpListener;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::serve::Shared;
use crate::{
    health::{OPENMETRICS, TEXT},
    kubernetes::health::WatchHealth,
};

/// Counters of the service.
#[derive(Debug, Default)]
pub(super) struct Counters {
    agents: Arc<AtomicUsize>,
    /// Snapshots that were begun.
    pub(super) snapshots: AtomicU64,
    /// Of these to agents that were too far behind.
    pub(super) resynced: AtomicU64,
    /// Agents that were cut off.
    pub(super) cut: AtomicU64,
    /// Octets of frames, before TLS.
    pub(super) octets: AtomicU64,
}

impl Counters {
    /// Counts one more agent, unless there are `most` already. It counts until this is dropped.
    pub(super) fn admit(&self, most: usize) -> Option<Admitted> {
        let more = |agents: usize| (agents < most).then_some(agents + 1);
        let order = Ordering::Relaxed;
        let admitted = self.agents.fetch_update(order, order, more);
        admitted.ok().map(|_| Admitted(Arc::clone(&self.agents)))
    }

    /// Agents that are connected.
    pub(super) fn agents(&self) -> usize {
        self.agents.load(Ordering::Relaxed)
    }
}

/// An agent that is connected.
#[derive(Debug)]
pub(super) struct Admitted(Arc<AtomicUsize>);

impl Drop for Admitted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One look at everything.
#[derive(Clone, Debug, Default)]
pub struct Scrape {
    /// Agents that are connected.
    pub agents: usize,
    /// Changes of objects since the start.
    pub changes: u64,
    /// Octets of frames.
    pub octets: u64,
    /// Snapshots that were begun.
    pub snapshots: u64,
    /// Of these to agents that were too far behind.
    pub resynced: u64,
    /// Agents that were cut off.
    pub cut: u64,
    /// Watches of the cluster.
    pub watches: Vec<WatchHealth>,
}

impl Scrape {
    fn of(shared: &Shared) -> Self {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Self {
            agents: shared.counters.agents(),
            changes: shared.sequence(),
            octets: read(&shared.counters.octets),
            snapshots: read(&shared.counters.snapshots),
            resynced: read(&shared.counters.resynced),
            cut: read(&shared.counters.cut),
            watches: shared.health.watches(),
        }
    }

    fn write(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let agents = gauge(self.agents);
        one(
            encoder,
            ("relay_agents", "Agents that are connected to this relay"),
            MetricType::Gauge,
            &agents,
        )?;
        for (name, help, value) in [
            (
                "relay_changes",
                "Changes of the cluster's objects that this relay sends to its agents",
                self.changes,
            ),
            (
                "relay_snapshots",
                "Times that an agent got every object, because it was new or had been away for too long",
                self.snapshots,
            ),
            (
                "relay_agents_resynced",
                "Times that a connected agent was so far behind that it got every object again",
                self.resynced,
            ),
            (
                "relay_agents_cut",
                "Agents that were cut off because they took nothing for 30 seconds",
                self.cut,
            ),
        ] {
            let counter = ConstCounter::new(value);
            one(encoder, (name, help), MetricType::Counter, &counter)?;
        }
        let family = encoder.encode_descriptor(
            "relay_sent",
            "Bytes that this relay sent to agents, before TLS",
            Some(&Unit::Bytes),
            MetricType::Counter,
        )?;
        ConstCounter::new(self.octets).encode(family)?;
        for (name, help, value) in [
            (
                "kubernetes_objects",
                "Objects of the cluster that this relay has",
                (|watch| watch.objects) as fn(&WatchHealth) -> usize,
            ),
            (
                "kubernetes_watch_stale_seconds",
                "How long a watch of this relay has not followed the API server, seconds; 0 = it does",
                |watch| usize::try_from(watch.stale_seconds).unwrap_or(usize::MAX),
            ),
        ] {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for watch in &self.watches {
                let labels = [("kind", watch.kind.as_str())];
                gauge(value(watch)).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }

    /// As Prometheus text.
    ///
    /// # Errors
    /// The text cannot be written.
    pub fn text(self) -> Result<String, std::fmt::Error> {
        let mut registry = Registry::with_prefix("holdfast");
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry)?;
        Ok(text)
    }
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.write(&mut encoder)
    }
}

fn one(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help): (&str, &str),
    kind: MetricType,
    value: &impl EncodeMetric,
) -> Result<(), std::fmt::Error> {
    value.encode(encoder.encode_descriptor(name, help, None, kind)?)
}

fn gauge(value: usize) -> ConstGauge<i64> {
    ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX))
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
    http_server::serve(socket, Limits::default(), service, tasks, stop).await;
}

fn answer(shared: &Shared, request: &Request<hyper::body::Incoming>) -> Response<Full<Bytes>> {
    let (status, kind, text) = match request.uri().path() {
        "/metrics" => match Scrape::of(shared).text() {
            Ok(text) => (StatusCode::OK, OPENMETRICS, text),
            Err(_) => {
                let text = "the metrics cannot be written\n".to_owned();
                (StatusCode::INTERNAL_SERVER_ERROR, TEXT, text)
            }
        },
        "/healthz" => (StatusCode::OK, TEXT, "ok\n".to_owned()),
        "/readyz" => match shared.awaited() {
            None => {
                let text = "ready: every kind of object has been read\n".to_owned();
                (StatusCode::OK, TEXT, text)
            }
            Some(awaited) => {
                let text = format!("not ready: {awaited}\n");
                (StatusCode::SERVICE_UNAVAILABLE, TEXT, text)
            }
        },
        _ => {
            let text = "there is /metrics, /healthz and /readyz\n".to_owned();
            (StatusCode::NOT_FOUND, TEXT, text)
        }
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    let kind = hyper::header::HeaderValue::from_static(kind);
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}
