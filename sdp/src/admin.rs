//! What people and probes ask: HTTP on a unix socket (status, policy, explain,
//! drain) and on the metrics address (metrics, health, readiness).
//!
//! Both run on one thread with a runtime of its own, so that a slow reader or a heavy scrape delays
//! no query.

use std::{fmt::Display, io, path::PathBuf, sync::Arc, thread};

use daemon::http_server::{JSON, OPENMETRICS, TEXT, answer};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
};
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use crate::{metrics::Metrics, shared_state::Shared};

mod as_owner;
pub mod client;
mod endpoints;
pub(crate) mod explain;
pub(crate) mod policy;
pub(crate) mod replicas;
mod server;
pub(crate) mod status;
pub(crate) mod steering;

pub use server::{AdminListeners, MetricsListener, remove_left};

/// Maximum length of a request's body, in bytes. Requests are small JSON objects.
const LARGEST_BODY: usize = 64 << 10;

/// Why the sockets for people and probes cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// Another process serves the socket at this path, or the file there is not a socket.
    #[error("--admin-socket {path}: another proxy uses it, or it is not a socket; give this proxy a different --name or --admin-socket", path = .0.display())]
    Taken(PathBuf),
    /// The admin socket cannot be created or bound.
    #[error("--admin-socket {path}: {source}; its directory must belong to the user of --user", path = .path.display())]
    Socket { path: PathBuf, source: io::Error },
    /// The metrics address cannot be bound.
    #[error("--metrics-address {address}: {source}; choose another one, or \"off\"")]
    Metrics { address: String, source: io::Error },
    /// The thread of the admin server, or its runtime, cannot be started.
    #[error("cannot start the admin thread: {0}")]
    Thread(io::Error),
}

/// The running admin thread. Dropping it stops the servers and waits for the thread.
#[derive(Debug)]
pub struct Admin {
    stop: CancellationToken,
    thread: Option<thread::JoinHandle<()>>,
}

impl Admin {
    /// Starts a thread that serves the admin socket and the metrics address.
    pub fn start(listeners: AdminListeners, shared: &Arc<Shared>) -> Result<Self, AdminError> {
        let stop = CancellationToken::new();
        let state = Arc::new(AdminState {
            metrics: Metrics::new(shared),
            shared: Arc::clone(shared),
        });
        let stopped = stop.clone();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(AdminError::Thread)?;
        let thread = thread::Builder::new()
            .name("sdp-admin".into())
            .spawn(move || runtime.block_on(listeners.serve(state, stopped)))
            .map_err(AdminError::Thread)?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Admin {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the admin thread panicked");
        }
    }
}

/// The socket through which a request came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SocketKind {
    Admin,
    Metrics,
}

struct AdminState {
    shared: Arc<Shared>,
    metrics: Metrics,
}

type Answer = Response<Full<Bytes>>;

impl AdminState {
    async fn answer(&self, kind: SocketKind, request: Request<Incoming>) -> Answer {
        let (head, body) = request.into_parts();
        match (kind, head.method, head.uri.path()) {
            (SocketKind::Admin, Method::GET, "/status") => json(&status::Status::of(&self.shared)),
            (SocketKind::Admin, Method::POST, "/policy") => match read_json(body).await {
                Ok(question) => json_or_not_found(policy::answer(&self.shared, &question)),
                Err(refusal) => refusal,
            },
            (SocketKind::Admin, Method::POST, "/explain") => match read_json(body).await {
                Ok(question) => json_or_not_found(explain::answer(&self.shared, &question)),
                Err(refusal) => refusal,
            },
            (SocketKind::Admin, Method::POST, "/drain") => {
                tracing::info!("drain requested through the admin socket");
                self.shared.drain.begin();
                json(&client::DrainStarted {
                    limit: self.shared.config.flags.drain_timeout,
                })
            }
            (_, Method::GET, "/metrics") => match self.metrics.text() {
                Ok(metrics) => answer(StatusCode::OK, OPENMETRICS, metrics),
                Err(error) => answer(StatusCode::INTERNAL_SERVER_ERROR, TEXT, error.to_string()),
            },
            (_, Method::GET, "/healthz") => answer(StatusCode::OK, TEXT, "alive\n".to_owned()),
            (_, Method::GET, "/readyz") => self.readyz(),
            _ => answer(
                StatusCode::NOT_FOUND,
                TEXT,
                "there is nothing here\n".to_owned(),
            ),
        }
    }

    fn readyz(&self) -> Answer {
        let missing = self.shared.ready.missing();
        if missing.is_empty() {
            let rules = status::rules_text(&self.shared.agent.link.status().rules);
            return answer(StatusCode::OK, TEXT, format!("ready; rules: {rules}\n"));
        }
        let text: String = missing
            .iter()
            .map(|(need, why)| format!("{need}: {why}\n"))
            .collect();
        answer(StatusCode::SERVICE_UNAVAILABLE, TEXT, text)
    }
}

/// The value as JSON, or status 404 with the reason why it does not exist.
fn json_or_not_found(found: Result<impl Serialize, impl Display>) -> Answer {
    match found {
        Ok(value) => json(&value),
        Err(error) => answer(StatusCode::NOT_FOUND, TEXT, error.to_string()),
    }
}

fn json(value: &impl Serialize) -> Answer {
    match serde_json::to_string(value) {
        Ok(text) => answer(StatusCode::OK, JSON, text),
        Err(error) => answer(StatusCode::INTERNAL_SERVER_ERROR, TEXT, error.to_string()),
    }
}

async fn read_json<T: serde::de::DeserializeOwned>(body: Incoming) -> Result<T, Answer> {
    let bad = |code, text: String| answer(code, TEXT, text);
    let bytes = match Limited::new(body, LARGEST_BODY).collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) if error.is::<LengthLimitError>() => {
            return Err(bad(StatusCode::PAYLOAD_TOO_LARGE, "too large\n".into()));
        }
        Err(error) => return Err(bad(StatusCode::BAD_REQUEST, error.to_string())),
    };
    serde_json::from_slice(&bytes).map_err(|e| bad(StatusCode::BAD_REQUEST, e.to_string()))
}
