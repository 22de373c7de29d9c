//! Why an agent has no stream of a relay, with the remedy.

use std::time::Duration;

use tonic::{Code, Status};

use super::receive::FrameError;
use crate::api::client::chain;

/// How rustls reports that the other side refuses the connection.
const ALERT: &str = "received fatal alert";
/// How rustls and tokio-rustls report another protocol than TLS, or a connection that ends.
const NO_TLS: [&str; 3] = ["corrupt message", "handshake eof", "UnexpectedEof"];

/// Why an agent has no stream.
#[derive(Debug, thiserror::Error)]
pub(super) enum StreamError {
    #[error(
        "the certificates cannot be used: {0}; correct --k8s-relay-ca, --k8s-relay-cert and --k8s-relay-key"
    )]
    Tls(String),
    #[error("{0}")]
    Unreachable(String),
    #[error(
        "its certificate is not trusted: {0}; set --k8s-relay-ca to the CA that signed it, and --k8s-relay-server-name to the name in it"
    )]
    Untrusted(String),
    #[error(
        "it does not accept the agent's certificate: {0}; set --k8s-relay-cert to one that the relay's --client-ca signed"
    )]
    Refused(String),
    #[error(
        "it closed the connection before it answered: {0}; if it does not accept the agent's certificate, set --k8s-relay-cert to one that the relay's --client-ca signed"
    )]
    Closed(String),
    #[error(
        "it does not answer with TLS: {0}; if it was started with --plaintext, start it with --tls-cert, --tls-key and --client-ca"
    )]
    NoTls(String),
    #[error(
        "it closed the connection before it answered: {0}; if it serves with TLS (--tls-cert), give the agent --k8s-relay-ca, --k8s-relay-cert and --k8s-relay-key in the place of --k8s-relay-plaintext"
    )]
    NotPlain(String),
    #[error("{0}")]
    Status(String),
    #[error("it sends an unreadable message: {0}")]
    Frame(#[from] FrameError),
    #[error("no message within {0:?}")]
    Silent(Duration),
    #[error("the stream ended")]
    Ended,
    #[error("the CA of --k8s-relay-ca has changed")]
    Renewed,
    #[error("the agent stops")]
    Stopped,
}

/// Why the relay ended the stream, or the connection broke.
pub(super) fn refused(status: &Status) -> StreamError {
    let reason = match status.message() {
        "" => chain(status),
        message => message.to_owned(),
    };
    let causes = chain(status);
    if let Some((_, alert)) = causes.split_once(ALERT) {
        // The causes contain the debug form of an error of hyper.
        let alert = alert.split(['"', '\\']).next().unwrap_or_default();
        return StreamError::Refused(format!("{ALERT}{alert}"));
    }
    match status.code() {
        Code::Unavailable | Code::ResourceExhausted | Code::Aborted => StreamError::Status(reason),
        code => StreamError::Status(format!("{code:?}: {reason}")),
    }
}

/// Why there is no answer to the request for a stream.
pub(super) fn unanswered(status: &Status, has_tls: bool) -> StreamError {
    match refused(status) {
        StreamError::Status(reason) if matches!(status.code(), Code::Cancelled | Code::Unknown) => {
            match has_tls {
                // The alert of a relay that refuses the certificate is lost if the relay closes the
                // connection while the request is on its way.
                true => StreamError::Closed(reason),
                // A relay with TLS does not understand the request.
                false => StreamError::NotPlain(reason),
            }
        }
        error => error,
    }
}

/// Why there is no connection.
pub(super) fn broken(reason: String) -> StreamError {
    if reason.contains("invalid peer certificate") {
        StreamError::Untrusted(reason)
    } else if reason.contains(ALERT) {
        // With TLS 1.3 the agent learns only after the handshake that its certificate is refused.
        StreamError::Refused(reason)
    } else if NO_TLS.iter().any(|text| reason.contains(text)) {
        StreamError::NoTls(reason)
    } else {
        StreamError::Unreachable(reason)
    }
}
