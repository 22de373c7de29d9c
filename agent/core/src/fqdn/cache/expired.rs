//! What a step of expiry did.

use shared_maps::EndpointId;

use super::NamePair;

/// What a step of expiry did.
#[derive(Debug, Default)]
pub(crate) struct Expired {
    /// Pairs that nothing keeps any more.
    pub pairs: Vec<NamePair>,
    /// Endpoints whose valid or expired addresses changed.
    pub endpoints: Vec<EndpointId>,
}
