//! The client of the API server: what the agent reads by watches, and what it writes.

pub mod backoff;
pub mod client;
mod decode;
pub mod lease;
pub mod lease_client;
mod one_object;
mod own_node;
pub mod own_set;
mod report;
#[cfg(any(test, feature = "scripted"))]
pub mod scripted;
pub(crate) mod start;
pub mod startup_taint;
pub(crate) mod watch;
