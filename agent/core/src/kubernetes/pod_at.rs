//! A pod, as the core needs it.

use std::{net::IpAddr, sync::Arc};

use crate::labels::LabelSet;

/// A pod with the labels of its identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodAt {
    /// `namespace/name`.
    pub key: Arc<str>,
    /// Key of the document that describes it, for people.
    pub document: Arc<str>,
    /// Its uid, if its document has one.
    pub uid: Option<Arc<str>>,
    /// The node that it runs on, if its document has it.
    pub node: Option<Arc<str>>,
    /// Labels of its identity, named ports among them.
    pub labels: LabelSet,
    /// Its addresses; empty if it has none of its own.
    pub addresses: Vec<IpAddr>,
}
