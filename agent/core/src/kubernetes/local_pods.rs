//! Pods that run on this node, with networks of their own.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

/// Pods of this node by `namespace/name`.
pub type LocalPods = BTreeMap<Arc<str>, LocalPod>;

/// A pod of this node that has an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalPod {
    /// Its uid; `None` if its document has none.
    pub uid: Option<Arc<str>>,
    /// Its addresses; at least one.
    pub addresses: Vec<IpAddr>,
}
