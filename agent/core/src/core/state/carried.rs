//! Identities that packets of other nodes may carry.

use std::collections::BTreeMap;

use shared_maps::IdentityId;

use crate::labels::LabelSet;

/// The identities, by the number of their object.
pub(crate) type Carried = BTreeMap<IdentityId, CarriedIdentity>;

/// The identity of the labels of an object.
#[derive(Debug)]
pub(crate) struct CarriedIdentity {
    pub(crate) labels: LabelSet,
    /// `None` while no number is free.
    pub(crate) identity: Option<IdentityId>,
}
