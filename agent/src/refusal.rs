//! JSON over the agent's unix sockets: requests that are read, and requests that are refused.

use daemon::http_server::{self, JSON};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{
    Request, Response, StatusCode,
    body::{Bytes, Incoming},
};
use serde_json::json;

use crate::runner::CoreAway;

/// An answer that is not 200: its status, with the reason and the remedy as one text.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) status: StatusCode,
    pub(crate) error: String,
}

impl Refusal {
    pub(crate) fn new(status: StatusCode, error: impl Into<String>) -> Self {
        Self {
            status,
            error: error.into(),
        }
    }

    pub(crate) fn bad_request(error: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, error)
    }

    pub(crate) fn not_found(error: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, error)
    }

    pub(crate) fn internal(error: &impl ToString) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
    }

    /// A refusal with status 503: the same request may succeed later.
    pub(crate) fn unavailable(error: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, error)
    }
}

impl From<CoreAway> for Refusal {
    fn from(away: CoreAway) -> Self {
        Self::unavailable(away.to_string())
    }
}

/// Reads the body of a request; a body of more than `limit` bytes is refused.
pub(crate) async fn body(request: Request<Incoming>, limit: usize) -> Result<Bytes, Refusal> {
    let body = Limited::new(request.into_body(), limit).collect().await;
    let bad = |error| Refusal::bad_request(format!("the request cannot be read: {error}"));
    Ok(body.map_err(bad)?.to_bytes())
}

/// The answer with a JSON document, or with the reason as its `error`.
pub(crate) fn answer(answer: Result<Vec<u8>, Refusal>) -> Response<Full<Bytes>> {
    match answer {
        Ok(body) => http_server::answer(StatusCode::OK, JSON, body),
        Err(Refusal { status, error }) => {
            http_server::answer(status, JSON, json!({"error": error}).to_string())
        }
    }
}
