//! The node's interfaces, as far as its tables need them.

use std::collections::BTreeSet;

/// Indexes of interfaces. Nothing of it matters while every pod of the node is open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeLinks {
    /// The bridges that pods of this node are on.
    pub bridges: BTreeSet<u32>,
    /// Ports of bridges that lead to no pod of this node. Each other port counts as a pod's, also one that
    /// is not known yet.
    pub other_ports: BTreeSet<u32>,
}
