//! Helpers for tests of the core: for this crate's tests, and the agent's (feature `testing`).

#![expect(clippy::unwrap_used, clippy::new_without_default, reason = "tests")]

pub mod cluster;
pub mod node;
pub mod packets;
pub mod pod;
pub mod policy;
pub mod restart;
