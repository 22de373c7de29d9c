//! Requests to the admin socket.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use http_body_util::{BodyExt as _, Full};
use hyper::{Method, Request, body::Bytes, header::HOST};
use hyper_util::rt::TokioIo;
use serde::{Serialize, de::DeserializeOwned};
use tokio::net::UnixStream;

use crate::admin::model::Failed;

/// Longest that an answer may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No process accepts connections on the socket.
    #[error(
        "no agent answers on {path}: {source}; {remedy}",
        path = .path.display(),
        remedy = remedy_of(source)
    )]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The agent stopped answering.
    #[error("the agent did not answer: {0}")]
    Http(#[from] hyper::Error),
    /// It took too long.
    #[error("the agent did not answer within 30 s; its log may say why")]
    Slow,
    /// The agent refused the request, with this reason.
    #[error("{0}")]
    Refused(String),
    /// Its answer is not of this release.
    #[error(
        "the agent's answer cannot be decoded ({0}); use the holdfast-agent of the release that runs"
    )]
    Answer(#[from] serde_json::Error),
}

/// How to reach an agent whose socket answered with `error`.
fn remedy_of(error: &io::Error) -> &'static str {
    if error.kind() == io::ErrorKind::PermissionDenied {
        "only root can connect to the agent: run this command as root (for example with sudo)"
    } else {
        "start one with `holdfast-agent run`, or give the socket of another one with --admin-socket"
    }
}

/// A client of one agent.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
}

impl Client {
    /// Of the agent at `socket`.
    pub fn new(socket: &Path) -> Self {
        Self {
            socket: socket.to_owned(),
        }
    }

    /// Reads.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.request(Method::GET, path, Vec::new()).await
    }

    /// Adds.
    pub async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, ClientError> {
        self.request(Method::POST, path, serde_json::to_vec(body)?)
            .await
    }

    /// Removes.
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
                })?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let mut request = Request::new(Full::new(Bytes::from(body)));
        *request.method_mut() = method;
        *request.uri_mut() = path.parse().map_err(|_| {
            ClientError::Refused(format!("{path} is not a valid request; check the argument"))
        })?;
        request
            .headers_mut()
            .insert(HOST, hyper::header::HeaderValue::from_static("agent"));
        // Owns the sender: its end closes the connection.
        let exchange = async move {
            let response = sender.send_request(request).await?;
            let status = response.status();
            let body = response.into_body().collect().await?.to_bytes();
            Ok::<_, hyper::Error>((status, body))
        };
        // The connection is driven beside the exchange and ends with it.
        let driven = async {
            let (exchange, _connection) = tokio::join!(exchange, async {
                let _closed = connection.await;
            });
            exchange
        };
        let exchanged = tokio::time::timeout(ANSWER_TIMEOUT, driven).await;
        let (status, body) = exchanged.map_err(|_| ClientError::Slow)??;
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
