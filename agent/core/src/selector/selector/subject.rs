//! An identity as selectors see it.

use std::collections::BTreeSet;

use ipnet::IpNet;
use shared_maps::IdentityId;

use crate::{
    ipcache::resolve::{cidr_of, node_cidr_of},
    labels::{Label, LabelSet},
};

/// What selectors need to know of an identity.
#[derive(Clone, Debug)]
pub struct Subject {
    pub id: IdentityId,
    pub labels: LabelSet,
    pub(in crate::selector) cidr: Option<IpNet>,
    /// Blocks of EgressFirewalls that the node is in, one for each of its addresses.
    pub(in crate::selector) node_cidrs: Vec<IpNet>,
}

impl Subject {
    /// Reads the CIDR labels once.
    pub fn new(id: IdentityId, labels: LabelSet) -> Self {
        let cidr = labels.iter().find_map(cidr_of);
        let node_cidrs = labels.iter().filter_map(node_cidr_of).collect();
        Self {
            id,
            labels,
            cidr,
            node_cidrs,
        }
    }

    pub(super) fn is_world(&self) -> bool {
        self.labels.iter().any(Label::is_world)
    }

    /// Whether its block is within one of these.
    pub(super) fn is_in(&self, parts: &BTreeSet<IpNet>) -> bool {
        self.cidr
            .is_some_and(|cidr| parts.iter().any(|part| part.contains(&cidr)))
    }

    pub(super) fn is_world_of(&self, prefix: IpNet) -> bool {
        let family = if matches!(prefix, IpNet::V4(_)) {
            "world-ipv4"
        } else {
            "world-ipv6"
        };
        self.labels.has_reserved(family) || self.labels.has_reserved("world")
    }
}
