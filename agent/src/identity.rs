//! Identities: numbers for sets of labels.

pub mod allocator;
pub mod checkpoint;
pub mod migration;
pub mod scopes;
