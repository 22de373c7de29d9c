//! The agent's side of the CNI plugin `holdfast-cni`: its requests, and its place in the node's CNI
//! configuration.

mod conflist;
pub(crate) mod endpoints;
pub(crate) mod enforcement;
pub mod failures;
pub mod install;
pub(crate) mod reports;
mod request;
pub(crate) mod server;
