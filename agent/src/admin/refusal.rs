//! Status of the errors that the admin interface answers with.

use dns_policy::endpoint_name::NoEndpoint;
use hyper::StatusCode;

use super::why::WhyError;
use crate::{endpoint::source::EndpointError, refusal::Refusal};

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
            WhyError::NoEndpoint(NoEndpoint::Unknown(_))
            | WhyError::ElsewherePod(_)
            | WhyError::NoPod(_)
            | WhyError::NoTarget(_) => StatusCode::NOT_FOUND,
            WhyError::NoEndpoint(NoEndpoint::Ambiguous { .. })
            | WhyError::Service { .. }
            | WhyError::IngressName
            | WhyError::Label(_) => StatusCode::BAD_REQUEST,
            WhyError::Cut(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, error.to_string())
    }
}
