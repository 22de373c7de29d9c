//! The admin interface: JSON over HTTP/1 on its own Unix socket.

mod clean;
pub mod client;
pub mod containers;
pub mod model;
pub(crate) mod problems;
pub mod query;
mod refusal;
mod resolver;
pub mod server;
pub mod standby;
mod status;
pub mod why;
