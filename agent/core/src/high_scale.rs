//! The high-scale ipcache: nodes know no pods of other nodes, and packets carry the identity of their
//! sender (`--high-scale-ipcache`).
//!
//! Here is what objects of the cluster say about it: which blocks are outside of the cluster, and how far
//! other nodes are. Packets are the datapath's.

pub mod blocks;
pub mod objects;
pub mod scope;

#[cfg(test)]
pub(crate) mod vectors;
