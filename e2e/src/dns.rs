//! DNS for the lab: records, a server with configurable faults, and a client that reports exactly
//! what it received.

pub(crate) mod probe;
pub mod server;
pub mod zone;
