//! Identities: numbers for sets of labels.

pub(crate) mod allocator;
pub mod assign;
pub mod checkpoint;
pub mod cluster;
pub mod cluster_counts;
pub mod cluster_object;
pub mod endpoint_checkpoint;
pub(crate) mod namespace_shares;
pub(crate) mod pods;
pub(crate) mod scopes;
