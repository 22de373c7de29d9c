//! Requests that are refused: status and reason.

use hyper::StatusCode;

use super::why::WhyError;
use crate::{endpoint::source::EndpointError, runner::CoreAway};

/// An answer that is not 200.
pub(super) struct Refusal {
    pub(super) status: StatusCode,
    pub(super) error: String,
}

impl Refusal {
    pub(super) fn new(status: StatusCode, error: impl Into<String>) -> Self {
        Self {
            status,
            error: error.into(),
        }
    }

    pub(super) fn bad_request(error: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, error)
    }

    pub(super) fn not_found(error: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, error)
    }

    pub(super) fn internal(error: &impl ToString) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
    }

    pub(super) fn unavailable(error: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, error)
    }
}

impl From<CoreAway> for Refusal {
    fn from(away: CoreAway) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, away.to_string())
    }
}

impl From<EndpointError> for Refusal {
    fn from(error: EndpointError) -> Self {
        let status = match &error {
            EndpointError::File(_) => StatusCode::INTERNAL_SERVER_ERROR,
            EndpointError::NotAdded(_) => StatusCode::NOT_FOUND,
            EndpointError::Taken { .. } | EndpointError::OfPod { .. } => StatusCode::CONFLICT,
            _ => StatusCode::UNPROCESSABLE_ENTITY,
        };
        Self::new(status, error.to_string())
    }
}

impl From<WhyError> for Refusal {
    fn from(error: WhyError) -> Self {
        let status = match &error {
            WhyError::Away(_) => StatusCode::SERVICE_UNAVAILABLE,
            WhyError::NoEndpoint(_)
            | WhyError::ElsewherePod(_)
            | WhyError::NoPod(_)
            | WhyError::NoTarget(_) => StatusCode::NOT_FOUND,
            WhyError::Ambiguous { .. }
            | WhyError::Service { .. }
            | WhyError::IngressName
            | WhyError::Label(_) => StatusCode::BAD_REQUEST,
            WhyError::Cut(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, error.to_string())
    }
}
