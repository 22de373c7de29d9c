//! What a relay counts, and its `/metrics`, `/healthz` and `/readyz`.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use daemon::http_server::{self, Admission, OPENMETRICS, Socket, TEXT};
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
use crate::health::WatchHealth;

/// Why a relay does not serve a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The connection could not be accepted, usually because no file descriptor is free.
    Accept,
    /// Connections without a request from one address.
    Crowded,
    /// The TLS handshake failed or was too slow, or only one of the two sides uses TLS.
    Handshake,
    /// The connection had no stream for longer than [`Bounds::request`].
    NoRequest,
    /// Neither sends nor takes anything.
    Silent,
    /// As many agents as may be.
    Agents,
    /// The renewed authority did not sign the agent's certificate.
    Certificate,
}

impl Refusal {
    /// All, as they are counted.
    pub const ALL: [Self; 7] = [
        Self::Accept,
        Self::Crowded,
        Self::Handshake,
        Self::NoRequest,
        Self::Silent,
        Self::Agents,
        Self::Certificate,
    ];

    /// Value of the label `reason`.
    pub fn label(self) -> &'static str {
        match self {
            Self::Accept => "accept",
            Self::Crowded => "crowded",
            Self::Handshake => "handshake",
            Self::NoRequest => "no_request",
            Self::Silent => "silent",
            Self::Agents => "agents",
            Self::Certificate => "certificate",
        }
    }
}

/// Counters of the relay's service since its start.
#[derive(Debug, Default)]
pub(super) struct Counters {
    /// Snapshots that were begun for agents.
    pub(super) snapshots: AtomicU64,
    /// Of these to agents that were too far behind.
    pub(super) resynced: AtomicU64,
    /// Agents that were cut off.
    pub(super) cut: AtomicU64,
    /// Bytes of frames, before TLS.
    pub(super) bytes: AtomicU64,
    refused: [AtomicU64; Refusal::ALL.len()],
}

impl Counters {
    /// Counts a peer that is not served.
    pub(super) fn refuse(&self, refusal: Refusal) {
        let counters = Refusal::ALL.iter().zip(&self.refused);
        for (_, counter) in counters.filter(|(one, _)| **one == refusal) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Peers that were not served, by reason.
    pub(super) fn refused(&self) -> Vec<(Refusal, u64)> {
        let counters = Refusal::ALL.iter().zip(&self.refused);
        counters
            .map(|(one, counter)| (*one, counter.load(Ordering::Relaxed)))
            .collect()
    }
}

/// The relay's figures at one moment, as `/metrics` shows them.
#[derive(Clone, Debug, Default)]
pub struct Scrape {
    pub agents: usize,
    /// Changes of objects since the start.
    pub changes: u64,
    /// Bytes of frames sent to agents, before TLS.
    pub bytes: u64,
    /// Snapshots that were begun for agents.
    pub snapshots: u64,
    /// Of these to agents that were too far behind.
    pub resynced: u64,
    /// Agents that were cut off.
    pub cut: u64,
    /// Peers that were not served, by reason.
    pub refused: Vec<(Refusal, u64)>,
    /// Since when renewed certificates cannot be used, seconds.
    pub certificates_stale: u64,
    pub watches: Vec<WatchHealth>,
}

impl Scrape {
    fn of(shared: &Shared) -> Self {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Self {
            agents: shared.agents(),
            changes: shared.sequence(),
            bytes: read(&shared.counters.bytes),
            snapshots: read(&shared.counters.snapshots),
            resynced: read(&shared.counters.resynced),
            cut: read(&shared.counters.cut),
            refused: shared.counters.refused(),
            certificates_stale: shared.certificates.seconds(),
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
        self.write_refused(encoder)?;
        let stale = gauge(usize::try_from(self.certificates_stale).unwrap_or(usize::MAX));
        one(
            encoder,
            (
                "relay_certificates_stale_seconds",
                "How long the files of --tls-cert, --tls-key and --client-ca have not been usable, seconds: \
                 the relay uses those that it read last; 0 = they are",
            ),
            MetricType::Gauge,
            &stale,
        )?;
        let family = encoder.encode_descriptor(
            "relay_sent",
            "Bytes that this relay sent to agents, before TLS",
            Some(&Unit::Bytes),
            MetricType::Counter,
        )?;
        ConstCounter::new(self.bytes).encode(family)?;
        self.write_watches(encoder)
    }

    fn write_watches(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
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

    fn write_refused(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let mut family = encoder.encode_descriptor(
            "relay_refused",
            "Connections and requests that this relay did not serve",
            None,
            MetricType::Counter,
        )?;
        for (refusal, count) in &self.refused {
            let labels = [("reason", refusal.label())];
            ConstCounter::new(*count).encode(family.encode_family(&labels)?)?;
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
    http_server::serve(socket, Admission::default(), service, tasks, stop).await;
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
