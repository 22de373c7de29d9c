//! Endpoints: pods' network interfaces on this node.

pub mod config_file;
pub(crate) mod discover;
#[expect(
    clippy::module_inception,
    reason = "the module is about many, the file about one"
)]
pub(crate) mod endpoint;
pub(crate) mod link_events;
pub(crate) mod manager;
pub(crate) mod policy_map;
pub mod source;
pub mod spec;
