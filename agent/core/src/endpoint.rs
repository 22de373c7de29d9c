//! Endpoints: pods' network interfaces on this node.

pub mod config_file;
#[expect(
    clippy::module_inception,
    reason = "the module is about many, the file about one"
)]
pub(crate) mod endpoint;
pub(crate) mod manager;
pub(crate) mod policy_map;
pub mod spec;
