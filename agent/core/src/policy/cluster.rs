//! Objects of the cluster, one file for each kind: a document becomes a typed value, or is refused
//! with the field and a remedy.
//!
//! Objects come whole out of kubectl: fields without a meaning here are accepted.

pub(crate) mod endpoint;
pub(crate) mod identity;
mod metadata;
pub(crate) mod name_resolver;
pub mod namespace;
pub mod node;
pub mod pod;
mod read;
pub mod service;
pub(crate) mod service_cidr;
pub mod slice;
pub(crate) mod world_cidrs;

pub use netpol::policy::Protocol;

#[cfg(test)]
mod tests;
