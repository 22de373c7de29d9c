//! Pods that run on this node, with networks of their own.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

/// By `namespace/name`.
pub(crate) type LocalPods = BTreeMap<Arc<str>, LocalPod>;

/// A pod of this node that has an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LocalPod {
    /// Its uid; none if its document has none.
    pub(crate) uid: Option<Arc<str>>,
    /// Its addresses; at least one.
    pub(crate) addresses: Vec<IpAddr>,
}
