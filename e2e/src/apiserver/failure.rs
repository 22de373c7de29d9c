//! Refusals as the API server words them: an HTTP code and a `Status` object.

use serde_json::{Value, json};

use super::kind::Kind;

/// A request that is refused.
#[derive(Clone, Debug)]
pub(super) enum Failure {
    /// Plain text 404: the group, version or kind is not served.
    UnknownPath,
    /// Any other refusal, with a `Status` object.
    Status {
        /// HTTP status code of the answer.
        code: u16,
        /// `reason` of the `Status` object, for example `ServiceUnavailable`.
        reason: &'static str,
        /// `message` of the `Status` object, for people.
        message: String,
    },
}

impl Failure {
    fn of(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        let message = message.into();
        Self::Status {
            code,
            reason,
            message,
        }
    }

    pub(super) fn unauthorized() -> Self {
        Self::of(401, "Unauthorized", "Unauthorized")
    }

    pub(super) fn forbidden(message: String) -> Self {
        Self::of(403, "Forbidden", message)
    }

    pub(super) fn not_found(kind: &Kind, name: &str) -> Self {
        Self::of(
            404,
            "NotFound",
            format!("{} \"{name}\" not found", kind.id()),
        )
    }

    pub(super) fn exists(kind: &Kind, name: &str) -> Self {
        let message = format!("{} \"{name}\" already exists", kind.id());
        Self::of(409, "AlreadyExists", message)
    }

    pub(super) fn conflict(kind: &Kind, name: &str) -> Self {
        let message = format!(
            "Operation cannot be fulfilled on {} \"{name}\": the object has been modified; please apply your changes to the latest version and try again",
            kind.id()
        );
        Self::of(409, "Conflict", message)
    }

    pub(super) fn bad_request(message: impl Into<String>) -> Self {
        Self::of(400, "BadRequest", message)
    }

    pub(super) fn invalid(kind: &Kind, name: &str, field: &str, problem: &str) -> Self {
        let (kind, group) = (&kind.kind, &kind.group);
        let group = if group.is_empty() {
            String::new()
        } else {
            format!(".{group}")
        };
        let message = format!("{kind}{group} \"{name}\" is invalid: {field}: {problem}");
        Self::of(422, "Invalid", message)
    }

    /// A patch that does not fit the object.
    pub(super) fn unprocessable(message: impl Into<String>) -> Self {
        Self::of(422, "Invalid", message)
    }

    pub(super) fn media_type(message: impl Into<String>) -> Self {
        Self::of(415, "UnsupportedMediaType", message)
    }

    pub(super) fn method(message: impl Into<String>) -> Self {
        Self::of(405, "MethodNotAllowed", message)
    }

    /// A list token, or a revision, that is older than the kept history.
    pub(super) fn expired(message: impl Into<String>) -> Self {
        Self::of(410, "Expired", message)
    }

    pub(super) fn too_many() -> Self {
        Self::of(429, "TooManyRequests", "storage is (re)initializing")
    }

    pub(super) fn internal(message: impl Into<String>) -> Self {
        Self::of(500, "InternalError", message)
    }

    pub(super) fn unavailable() -> Self {
        Self::of(
            503,
            "ServiceUnavailable",
            "the server is currently unable to handle the request",
        )
    }

    pub(super) fn code(&self) -> u16 {
        match self {
            Self::UnknownPath => 404,
            Self::Status { code, .. } => *code,
        }
    }

    /// Body of the answer, and its media type.
    pub(super) fn body(&self) -> (String, &'static str) {
        match self {
            Self::UnknownPath => ("404 page not found\n".to_owned(), "text/plain"),
            Self::Status { .. } => (self.status().to_string(), "application/json"),
        }
    }

    /// The `Status` object of an answer or of an `ERROR` event.
    pub(super) fn status(&self) -> Value {
        let Self::Status {
            code,
            reason,
            message,
        } = self
        else {
            return Value::Null;
        };
        let details = match code {
            429 => json!({"retryAfterSeconds": 1}),
            _ => json!({}),
        };
        json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": message, "reason": reason, "details": details, "code": code,
        })
    }
}
