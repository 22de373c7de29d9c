//! What both programs need to run on a node: sockets that anyone may connect to,
//! directories of settings, log lines, directories of pins, and the steering program.
//! Nothing here knows endpoints' rules or DNS messages.
#![warn(missing_docs)]

pub mod command_line;
pub mod config_dir;
pub mod descriptors;
pub mod flags;
pub mod guests;
pub mod http_client;
pub mod http_server;
pub mod ipv6;
pub mod link_stream;
mod log_filter;
pub mod lookup;
pub mod map_memory;
pub mod metrics;
mod one_line;
pub mod peer;
pub mod pins;
pub mod port_hold;
pub mod regular_file;
pub mod service_manager;
pub mod settings_file;
pub mod state_dir;
pub mod state_file;
pub mod steering_program;
pub mod tcp_owner;
pub mod unix_socket;
