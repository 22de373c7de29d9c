//! Instances of endpoints: numbers are reused, so rules belong to a number, an interface and an
//! identity.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use shared_maps::{EndpointId, IdentityId};

/// An endpoint with the properties that distinguish it from a later one with the same number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    /// Host-side interface; 0 if no map has it.
    pub ifindex: u32,
    pub identity: IdentityId,
    pub addresses: BTreeSet<IpAddr>,
}

/// All endpoints of the node.
pub(crate) type Instances = BTreeMap<EndpointId, Instance>;

impl Instance {
    /// An instance without addresses, which the caller adds.
    pub fn new(ifindex: u32, identity: IdentityId) -> Self {
        Self {
            ifindex,
            identity,
            addresses: BTreeSet::new(),
        }
    }

    /// Whether rules that were made for `self` also apply to `now`. If the interface of one of them
    /// is unknown, the interfaces count as the same.
    pub fn is_same(&self, now: &Self) -> bool {
        let interface = self.ifindex == now.ifindex || self.ifindex == 0 || now.ifindex == 0;
        interface && self.identity == now.identity && !self.addresses.is_disjoint(&now.addresses)
    }
}
