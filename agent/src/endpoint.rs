//! Endpoints: pods' network interfaces on this node.

pub mod config_file;
pub mod discover;
#[expect(
    clippy::module_inception,
    reason = "the module is about many, the file about one"
)]
pub mod endpoint;
pub mod link_events;
pub mod manager;
pub mod policy_map;
pub mod source;
pub mod spec;
