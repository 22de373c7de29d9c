//! The connection to the API server: from a kubeconfig, or from the pod that the agent runs in.

use std::{
    error::Error,
    path::{Path, PathBuf},
    time::Duration,
};

use agent_core::checksum::Sum;
use http_body_util::{BodyExt as _, Limited};
use hyper::{Method, Request, Response, Uri, header::CONTENT_TYPE};
use kube::{
    Client, Config,
    client::Body,
    config::{KubeConfigOptions, Kubeconfig},
};
use serde::Deserialize;
use serde_json::Value;

pub use super::start::start;
use crate::ApiSettings;

/// Where Kubernetes puts the token and the CA of a pod.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// Longest time to establish a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// Longest time until the headers of an answer arrive.
const ANSWER: Duration = Duration::from_secs(30);
/// Maximum size of one object, in bytes. An API server stores at most 1.5 MB.
const OBJECT_MAX: usize = 8 << 20;
/// Maximum size of an answer that says why a request failed, in bytes.
const REASON_MAX: usize = 64 << 10;

/// Why no API server can be used. Exit code 2.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The kubeconfig cannot be used.
    #[error("--kubeconfig {path}: {reason}; write one that `kubectl --kubeconfig {path} get namespaces` can use", path = .path.display())]
    Kubeconfig { path: PathBuf, reason: String },
    /// There is no service account.
    #[error(
        "there is no account for the API server: {reason}; run in a pod with a service account (automountServiceAccountToken: true), or give --kubeconfig FILE"
    )]
    Account { reason: String },
    /// The server's URL cannot be used.
    #[error("--k8s-api-server {url}: {reason}; write for example https://192.0.2.1:6443")]
    Server { url: String, reason: String },
    /// The server does not accept the token or certificate.
    #[error("the API server {server} does not accept the credentials in {path}: {reason}; renew the token or certificate there", path = .path.display())]
    Unauthorized {
        server: String,
        /// The token file or the kubeconfig that holds the credentials.
        path: PathBuf,
        reason: String,
    },
    /// The token cannot be put into an HTTP header.
    #[error("{}", line_break(.path))]
    Token {
        /// File of the token, or the kubeconfig.
        path: PathBuf,
    },
    /// The server's certificate cannot be verified.
    #[error("the certificate of the API server {server} is not trusted with the CA of {path}: {reason}; write the CA of this cluster there, or correct the server's address", path = .path.display())]
    Untrusted {
        server: String,
        /// The CA file, or the kubeconfig that names it.
        path: PathBuf,
        reason: String,
    },
}

/// Why a request to the API server failed.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// The server answered with an error status.
    #[error("{code}: {message}")]
    Refused {
        /// HTTP status.
        code: u16,
        /// The `message` of the server's `Status` object.
        message: String,
    },
    /// The server does not answer in time, or not at all.
    #[error("{0}")]
    Unreachable(String),
    /// The answer is not what the API server of Kubernetes sends.
    #[error("the answer cannot be read: {0}")]
    Unreadable(String),
    /// No request can be sent: the file has changed, and its new token cannot be put into an HTTP header.
    #[error("{}", line_break(.0))]
    Token(PathBuf),
}

impl RequestError {
    /// HTTP status of a refusal.
    pub fn code(&self) -> Option<u16> {
        match self {
            Self::Refused { code, .. } => Some(*code),
            _ => None,
        }
    }
}

/// A client of the API server.
#[derive(Clone)]
pub struct Api {
    client: Client,
    server: String,
    namespace: String,
    /// File of the token, or the kubeconfig.
    token_file: PathBuf,
    authorities: Vec<String>,
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api")
            .field("server", &self.server)
            .finish_non_exhaustive()
    }
}

impl Api {
    /// Reads the settings and asks the server once.
    ///
    /// # Errors
    /// The settings cannot be used, or the server does not accept them. A server that does not
    /// answer is no error: it may start later.
    pub async fn connect(settings: &ApiSettings) -> Result<Self, ClientError> {
        let api = Self::prepare(settings).await?;
        api.check(settings).await?;
        Ok(api)
    }

    /// Builds the client from the kubeconfig, or from the pod's service account, without a request
    /// to the server.
    async fn prepare(settings: &ApiSettings) -> Result<Self, ClientError> {
        let mut config = match &settings.kubeconfig {
            Some(path) => from_kubeconfig(path).await?,
            None => from_account(settings.server.is_some())?,
        };
        if let Some(url) = &settings.server {
            config.cluster_url = server_uri(url)?;
        }
        config.connect_timeout = Some(CONNECT);
        // The watches have their own back-off, which counts failures.
        config.default_retry = false;
        let server = config.cluster_url.to_string();
        let namespace = config.default_namespace.clone();
        let token_file = config.auth_info.token_file.as_ref().map(PathBuf::from);
        let token_file = token_file.unwrap_or_else(|| credentials_file(settings, "token"));
        let certificates = config.root_cert.iter().flatten();
        let authorities = certificates.map(|one| Sum::of(one).hex()).collect();
        let client = Client::try_from(config).map_err(|error| {
            let reason = chain(&error);
            match &settings.kubeconfig {
                Some(path) => ClientError::Kubeconfig {
                    path: path.clone(),
                    reason,
                },
                None => ClientError::Account { reason },
            }
        })?;
        Ok(Self {
            client,
            server: server.trim_end_matches('/').to_owned(),
            namespace,
            authorities,
            token_file,
        })
    }

    /// URL of the API server, without a final slash.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// Fingerprints of the certificates that the server's certificate is verified with.
    pub fn authorities(&self) -> &[String] {
        &self.authorities
    }

    /// Namespace of the service account, or of the kubeconfig's context.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Requests the server's version. Every account may read it, even the account of an agent with relays,
    /// and the server examines the credentials first.
    async fn check(&self, settings: &ApiSettings) -> Result<(), ClientError> {
        let request = Request::get("/version").body(Vec::new());
        let request = request.expect("a constant request");
        let Err(error) = self.send(request).await else {
            return Ok(());
        };
        // The server accepts the account, but this cluster does not let the account read the version.
        if error.code() == Some(403) {
            return Ok(());
        }
        let (server, reason) = (self.server.clone(), error.to_string());
        if error.code() == Some(401) {
            let path = credentials_file(settings, "token");
            return Err(ClientError::Unauthorized {
                server,
                path,
                reason,
            });
        }
        if let RequestError::Token(path) = error {
            return Err(ClientError::Token { path });
        }
        // The text comes from rustls: the type of its error is lost on the way.
        if reason.contains("invalid peer certificate") {
            let path = credentials_file(settings, "ca.crt");
            return Err(ClientError::Untrusted {
                server,
                path,
                reason,
            });
        }
        tracing::warn!(
            server,
            reason,
            "the API server cannot be asked yet; the agent tries again"
        );
        Ok(())
    }

    /// Sends a request with a JSON object; gives the object that the server answers.
    pub(crate) async fn json(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Value, RequestError> {
        self.json_within(method, path, body, OBJECT_MAX).await
    }

    /// Like `json`, with an answer of at most `most` bytes.
    pub async fn json_within(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        most: usize,
    ) -> Result<Value, RequestError> {
        let text = body.map(|body| body.to_string().into_bytes());
        let content = match (&method, body) {
            // An array is a list of operations (RFC 6902).
            (&Method::PATCH, Some(Value::Array(_))) => "application/json-patch+json",
            (&Method::PATCH, _) => "application/merge-patch+json",
            _ => "application/json",
        };
        let request = Request::builder().method(method).uri(path);
        let request = request.header(CONTENT_TYPE, content);
        let request = request.body(text.unwrap_or_default());
        let request = request.map_err(|error| RequestError::Unreadable(chain(&error)))?;
        let body = Limited::new(self.send(request).await?.into_body(), most).collect();
        let body = tokio::time::timeout(ANSWER, body).await;
        let body = body
            .map_err(|_| RequestError::Unreachable(format!("no answer within {ANSWER:?}")))?
            .map_err(|error| RequestError::Unreachable(chain(&*error)))?;
        serde_json::from_slice(&body.to_bytes())
            .map_err(|error| RequestError::Unreadable(error.to_string()))
    }

    fn not_sent(&self, reason: String) -> RequestError {
        // The text comes from kube, which reads the file again each minute: the type of its error is lost.
        match reason.contains("invalid bearer token") {
            true => RequestError::Token(self.token_file.clone()),
            false => RequestError::Unreachable(reason),
        }
    }

    /// Sends a request; gives the answer once it has begun. An answer that refuses is an error.
    pub(crate) async fn send(
        &self,
        request: Request<Vec<u8>>,
    ) -> Result<Response<Body>, RequestError> {
        let sent = self.client.send(request.map(Body::from));
        let answer = tokio::time::timeout(ANSWER, sent).await;
        let answer = answer
            .map_err(|_| RequestError::Unreachable(format!("no answer within {ANSWER:?}")))?
            .map_err(|error| self.not_sent(chain(&error)))?;
        if answer.status().is_success() {
            return Ok(answer);
        }
        let code = answer.status().as_u16();
        let body = Limited::new(answer.into_body(), REASON_MAX).collect();
        let body = tokio::time::timeout(ANSWER, body).await;
        let body = body.ok().and_then(Result::ok).map(|body| body.to_bytes());
        let status = body.and_then(|body| serde_json::from_slice::<Status>(&body).ok());
        let message = status.and_then(|status| status.message);
        Err(RequestError::Refused {
            code,
            message: message.unwrap_or_else(|| "without a reason".to_owned()),
        })
    }
}

fn line_break(token: &Path) -> String {
    format!(
        "{}: the token has a line break or another character that no token has; write the token \
         without a line break, for example with `printf %s`",
        token.display()
    )
}

/// The kubeconfig, or a file of the service account.
fn credentials_file(settings: &ApiSettings, of_account: &str) -> PathBuf {
    match &settings.kubeconfig {
        Some(path) => path.clone(),
        None => Path::new(ACCOUNT).join(of_account),
    }
}

/// The server's reason for a refusal.
#[derive(Deserialize)]
struct Status {
    message: Option<String>,
}

async fn from_kubeconfig(path: &Path) -> Result<Config, ClientError> {
    let refuse = |error: &dyn Error| ClientError::Kubeconfig {
        path: path.to_owned(),
        reason: chain(error),
    };
    let kubeconfig = Kubeconfig::read_from(path).map_err(|error| refuse(&error))?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
    config.map_err(|error| refuse(&error))
}

/// The configuration of the service account. With `has_server` the settings name the server, and
/// the environment is not read.
fn from_account(has_server: bool) -> Result<Config, ClientError> {
    let config = match has_server {
        true => Config::incluster_dns(),
        false => Config::incluster_env(),
    };
    config.map_err(|error| ClientError::Account {
        reason: format!("{ACCOUNT}: {}", chain(&error)),
    })
}

fn server_uri(url: &str) -> Result<Uri, ClientError> {
    let refuse = |reason: String| ClientError::Server {
        url: url.to_owned(),
        reason,
    };
    let uri: Uri = url.parse().map_err(|error| refuse(chain(&error)))?;
    match uri.scheme_str() {
        Some("https") if uri.host().is_some() => Ok(uri),
        _ => Err(refuse("is not an https URL".to_owned())),
    }
}

/// The texts of an error and of its causes, without repetitions.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn refused(kubeconfig: &str, server: Option<&str>) -> String {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config");
        if !kubeconfig.is_empty() {
            std::fs::write(&path, kubeconfig).unwrap();
        }
        let settings = ApiSettings {
            kubeconfig: Some(path.clone()),
            server: server.map(str::to_owned),
        };
        let error = Api::connect(&settings).await.unwrap_err().to_string();
        error.replace(&path.display().to_string(), "FILE")
    }

    const GOOD: &str = r#"{"apiVersion": "v1", "kind": "Config", "current-context": "x",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}]}"#;

    #[tokio::test]
    async fn a_kubeconfig_that_cannot_be_used_is_named_with_a_remedy() {
        for (text, reason) in [
            ("", "No such file"),
            ("{", "parse"),
            ("{}", "context"),
            (&GOOD.replace("http://127.0.0.1:1", "not a url"), "url"),
            (
                &GOOD.replace(r#""name": "c","#, r#""name": "other","#),
                "cluster",
            ),
        ] {
            let error = refused(text, None).await;
            assert!(error.starts_with("--kubeconfig FILE: "), "{error}");
            assert!(error.contains(reason), "{error}");
            assert!(
                error.ends_with("`kubectl --kubeconfig FILE get namespaces` can use"),
                "{error}"
            );
        }
        for url in ["192.0.2.1:6443", "http://192.0.2.1", "x y"] {
            let error = refused(GOOD, Some(url)).await;
            assert!(
                error.starts_with(&format!("--k8s-api-server {url}: ")),
                "{error}"
            );
            assert!(error.contains("https://192.0.2.1:6443"), "{error}");
        }
    }

    #[tokio::test]
    async fn a_token_file_that_ends_with_a_line_break_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let token = dir.path().join("token");
        std::fs::write(&token, "t\n").unwrap();
        let token = token.display().to_string();
        let kubeconfig = GOOD.replace(r#""token": "t""#, &format!(r#""tokenFile": "{token}""#));
        let error = refused(&kubeconfig, None).await;
        let begin = format!("{token}: the token has a line break");
        assert!(error.starts_with(&begin), "{error}");
        // The same file, written while the program runs.
        let path = dir.path().join("config");
        std::fs::write(&path, &kubeconfig).unwrap();
        let settings = ApiSettings {
            kubeconfig: Some(path),
            server: None,
        };
        let api = Api::prepare(&settings).await.unwrap();
        let error = api.json(Method::GET, "/api/v1/pods", None).await;
        let error = error.unwrap_err().to_string();
        assert!(error.starts_with(&begin), "{error}");
    }

    #[tokio::test]
    async fn a_server_that_does_not_answer_may_come() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config");
        std::fs::write(&path, GOOD).unwrap();
        let settings = ApiSettings {
            kubeconfig: Some(path),
            server: None,
        };
        assert!(Api::connect(&settings).await.is_ok());
    }
}
