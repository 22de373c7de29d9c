//! DNS for the lab: records, a server that can misbehave, a client that
//! reports exactly what it saw.

pub(crate) mod probe;
pub mod server;
pub mod zone;
