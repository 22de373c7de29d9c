//! The way to the servers and back.

pub(crate) mod udp;
