//! The core in the hands of tests: of this crate's, and of the agent's (feature `testing`).

#![expect(clippy::unwrap_used, clippy::new_without_default, reason = "tests")]

pub mod cluster;
pub mod node;
pub mod packets;
pub mod pod;
pub mod policy;
pub mod restart;
