//! Endpoints: pods' network interfaces on this node.

pub mod config_file;
