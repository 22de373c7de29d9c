//! Endpoints: pods' network interfaces on this node.

pub mod config_file;
pub mod discover;
pub mod source;
