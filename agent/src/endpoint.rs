//! Endpoints: pods' network interfaces on this node.

pub mod container;
pub(crate) mod discover;
pub(crate) mod link_events;
pub mod source;
