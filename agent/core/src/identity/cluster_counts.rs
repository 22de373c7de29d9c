//! How many label sets have numbers of the cluster.

use serde::{Deserialize, Serialize};

/// Label sets, by where their numbers come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterCounts {
    /// Numbers of the cluster that this node knows.
    pub known: usize,
    /// Label sets in use that have a number of this node.
    pub local: usize,
    /// Label sets that wait for a number.
    pub waiting: usize,
}
