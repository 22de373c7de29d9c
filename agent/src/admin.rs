//! The admin interface: JSON over HTTP/1 on a unix socket of its own.

pub mod model;
pub mod server;
pub mod why;
