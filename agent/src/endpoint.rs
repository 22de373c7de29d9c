//! Endpoints: pods' network interfaces on this node.

pub mod discover;
pub mod source;
