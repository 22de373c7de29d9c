//! Requests to the admin socket.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use daemon::http_client::{self, AnswerError, AnswerLimits};
use http_body_util::Full;
use hyper::{Method, Request, body::Bytes, header::HOST};
use serde::{Serialize, de::DeserializeOwned};
use tokio::net::UnixStream;

use super::model::Failed;

/// Longest time for an answer, and its largest size. The dump of an ipcache with a million entries has a quarter of
/// that size.
const LIMITS: AnswerLimits = AnswerLimits {
    body: 512 << 20,
    begins_within: WITHIN,
    within: WITHIN,
};
const WITHIN: Duration = Duration::from_secs(30);
/// Longest time until the answer to a read-only request begins. An agent that needs longer counts as hung.
const READ_BEGINS_WITHIN: Duration = Duration::from_secs(10);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No process accepts connections on the socket.
    #[error(
        "no agent answers on {path}: {source}; {remedy}",
        path = .path.display(),
        remedy = remedy_of(source, start)
    )]
    Connect {
        path: PathBuf,
        source: io::Error,
        /// Command that starts a process which answers there.
        start: &'static str,
    },
    /// The agent stopped answering, or its answer is too large or too late.
    #[error("{path}: the agent did not answer: {source}; its log may say why", path = .path.display())]
    Answer { path: PathBuf, source: AnswerError },
    /// The agent refused the request, with this reason.
    #[error("{0}")]
    Refused(String),
    /// The answer does not have the format of this release.
    #[error(
        "the agent's answer cannot be decoded ({0}); use the holdfast-agent of the release that runs"
    )]
    Decode(#[from] serde_json::Error),
}

/// What the user can do if the connection to the agent's socket failed with `error`.
fn remedy_of(error: &io::Error, start: &str) -> String {
    if error.kind() == io::ErrorKind::PermissionDenied {
        "only root can connect to the agent: run this command as root (for example with sudo)"
            .to_owned()
    } else {
        format!("start one with `{start}`, or give the socket of another one with --admin-socket")
    }
}

/// A client of one agent.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
    start: &'static str,
}

impl Client {
    /// A client that sends requests to the agent at `socket`.
    pub fn new(socket: &Path) -> Self {
        Self {
            socket: socket.to_owned(),
            start: "holdfast-agent run",
        }
    }

    /// A client that sends requests to the `netpol run` at `socket`.
    pub fn of_netpol(socket: &Path) -> Self {
        Self {
            start: "holdfast-agent netpol run",
            ..Self::new(socket)
        }
    }

    /// A client that sends requests to the agent that stands by, at `socket`.
    pub(crate) fn of_standby(socket: &Path) -> Self {
        Self {
            start: "holdfast-agent run --standby",
            ..Self::new(socket)
        }
    }

    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.request(Method::GET, path, Vec::new()).await
    }

    pub async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, ClientError> {
        self.request(Method::POST, path, serde_json::to_vec(body)?)
            .await
    }

    pub async fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.request(Method::DELETE, path, Vec::new()).await
    }

    async fn request<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<T, ClientError> {
        let stream =
            UnixStream::connect(&self.socket)
                .await
                .map_err(|source| ClientError::Connect {
                    path: self.socket.clone(),
                    source,
                    start: self.start,
                })?;
        let mut request = Request::new(Full::new(Bytes::from(body)));
        *request.method_mut() = method.clone();
        *request.uri_mut() = path.parse().map_err(|_| {
            ClientError::Refused(format!("{path} is not a valid request; check the argument"))
        })?;
        request
            .headers_mut()
            .insert(HOST, hyper::header::HeaderValue::from_static("agent"));
        let mut limits = LIMITS;
        if method == Method::GET {
            limits.begins_within = READ_BEGINS_WITHIN;
        }
        let answer = http_client::exchange(stream, request, limits).await;
        let answer = answer.map_err(|source| ClientError::Answer {
            path: self.socket.clone(),
            source,
        })?;
        let (status, body) = (answer.status(), answer.into_body());
        if status.is_success() {
            return Ok(serde_json::from_slice(&body)?);
        }
        let reason = serde_json::from_slice::<Failed>(&body).map_or_else(
            |_| format!("the agent answered {status}"),
            |failed| failed.error,
        );
        Err(ClientError::Refused(reason))
    }
}
