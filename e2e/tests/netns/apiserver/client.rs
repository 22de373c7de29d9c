//! A client that shows each answer as it came: code, warnings, and the lines of a watch.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::apiserver::ApiServer;
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, pem::PemObject as _};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tokio_util::task::TaskTracker;

/// Longest wait for a line.
const LIMIT: Duration = Duration::from_secs(10);

/// A client with one token.
pub(crate) struct Client {
    address: SocketAddr,
    tls: TlsConnector,
    token: String,
    connections: TaskTracker,
}

/// An answer with its whole body.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) code: u16,
    pub(crate) warning: Option<String>,
    pub(crate) text: String,
    pub(crate) body: Value,
}

/// Response of a running watch, whose body is read line by line.
pub(crate) struct Lines {
    pub(crate) code: u16,
    body: Incoming,
    rest: Vec<u8>,
}

impl Client {
    /// A client with the token that the agent uses.
    pub(crate) fn agent(server: &ApiServer) -> Result<Self> {
        Self::with_token(server, &server.files().token)
    }

    /// A client that may do everything.
    pub(crate) fn admin(server: &ApiServer) -> Result<Self> {
        let token = server.files().admin.with_file_name("admin.token");
        Self::with_token(server, &token)
    }

    fn with_token(server: &ApiServer, token: &Path) -> Result<Self> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(&server.files().ca)?)?;
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let address = server.url();
        let address = address.strip_prefix("https://").context("no https")?;
        Ok(Self {
            address: address.parse()?,
            tls: TlsConnector::from(Arc::new(config)),
            token: std::fs::read_to_string(token)?,
            connections: TaskTracker::new(),
        })
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>> {
        let stream = TcpStream::connect(self.address).await?;
        let name = ServerName::from(self.address.ip());
        let stream = self.tls.connect(name, stream).await?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        self.connections.spawn(connection);
        Ok(sender.send_request(request).await?)
    }

    fn request(
        &self,
        method: &str,
        path: &str,
        media: &str,
        body: &str,
    ) -> Result<Request<Full<Bytes>>> {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "kubernetes")
            .header("authorization", format!("Bearer {}", self.token))
            .header("content-type", media);
        Ok(request.body(Full::new(Bytes::from(body.to_owned())))?)
    }

    async fn whole(&self, method: &str, path: &str, media: &str, body: &str) -> Result<Answer> {
        let answer = self.send(self.request(method, path, media, body)?).await?;
        let (head, body) = answer.into_parts();
        let text = String::from_utf8(body.collect().await?.to_bytes().to_vec())?;
        let warning = head.headers.get("warning");
        Ok(Answer {
            code: head.status.as_u16(),
            warning: warning.map(|w| w.to_str().map(str::to_owned)).transpose()?,
            body: serde_json::from_str(&text).unwrap_or_default(),
            text,
        })
    }

    pub(crate) async fn get(&self, path: &str) -> Result<Answer> {
        self.whole("GET", path, "", "").await
    }

    pub(crate) async fn post(&self, path: &str, object: &Value) -> Result<Answer> {
        self.whole("POST", path, "application/json", &object.to_string())
            .await
    }

    pub(crate) async fn put(&self, path: &str, object: &Value) -> Result<Answer> {
        self.whole("PUT", path, "application/json", &object.to_string())
            .await
    }

    /// Deletes the object at `path`. `options` are the `DeleteOptions`, or null.
    pub(crate) async fn delete(&self, path: &str, options: &Value) -> Result<Answer> {
        let body = match options {
            Value::Null => String::new(),
            options => options.to_string(),
        };
        self.whole("DELETE", path, "application/json", &body).await
    }

    pub(crate) async fn patch(&self, path: &str, patch: &Value) -> Result<Answer> {
        let media = "application/merge-patch+json";
        self.whole("PATCH", path, media, &patch.to_string()).await
    }

    pub(crate) async fn json_patch(&self, path: &str, patch: &Value) -> Result<Answer> {
        let media = "application/json-patch+json";
        self.whole("PATCH", path, media, &patch.to_string()).await
    }

    /// Lists only the metadata of the objects at `path`.
    pub(crate) async fn metadata(&self, path: &str) -> Result<Answer> {
        let mut request = self.request("GET", path, "", "")?;
        let accept = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
        request.headers_mut().insert("accept", accept.parse()?);
        let body = self.send(request).await?.into_body().collect().await?;
        Ok(Answer {
            code: 200,
            warning: None,
            text: String::new(),
            body: serde_json::from_slice(&body.to_bytes())?,
        })
    }

    pub(crate) async fn watch(&self, path: &str) -> Result<Lines> {
        let answer = self.send(self.request("GET", path, "", "")?).await?;
        Ok(Lines {
            code: answer.status().as_u16(),
            body: answer.into_body(),
            rest: Vec::new(),
        })
    }
}

impl Lines {
    /// The next line; `None` at the end. An error if the connection was broken off.
    pub(crate) async fn next(&mut self) -> Result<Option<Value>> {
        tokio::time::timeout(LIMIT, self.line())
            .await
            .context("no line of the watch")?
    }

    /// The next line that is no bookmark: its type and the name of its object.
    pub(crate) async fn change(&mut self) -> Result<(String, String)> {
        loop {
            let line = self.next().await?.context("the watch ended")?;
            let word = line["type"].as_str().unwrap_or_default().to_owned();
            if word != "BOOKMARK" {
                let name = line["object"]["metadata"]["name"].as_str();
                return Ok((word, name.unwrap_or_default().to_owned()));
            }
        }
    }

    async fn line(&mut self) -> Result<Option<Value>> {
        loop {
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                return Ok(Some(serde_json::from_slice(&line)?));
            }
            let Some(frame) = self.body.frame().await else {
                ensure!(self.rest.is_empty(), "half a line");
                return Ok(None);
            };
            if let Ok(data) = frame?.into_data() {
                self.rest.extend_from_slice(&data);
            }
        }
    }
}
