//! The lab: a node, its pods and the world outside, each a network namespace,
//! with real programs under test and small servers and probes of our own.
//!
//! ```text
//!  pod a ──eth0──lxca─┐                       ┌─ DNS servers  192.0.2.53, .54
//!                     ├─ node ──up0────eth0─ world
//!  pod b ──eth0──lxcb─┘   agent, SDPs         └─ web servers  203.0.113.*, 198.51.100.*
//! ```
//!
//! Needs root. A missing privilege is a failure, never a skipped test.

pub mod apiserver;
pub(crate) mod audit;
pub mod bench;
pub mod bridge;
pub mod cilium;
pub mod cni;
pub mod config;
pub mod cri;
pub mod dns;
pub mod fleet;
pub mod guide;
pub mod ha;
pub mod hostile;
pub(crate) mod http;
pub mod in_memory;
pub mod kernel;
pub mod lab;
mod listening;
pub mod load;
pub mod netns;
pub mod netpol_run;
pub mod node;
pub(crate) mod nsd;
pub mod packet;
pub mod pod;
pub mod policy;
pub mod process;
pub mod raw_frames;
pub mod reachability;
pub(crate) mod received_answers;
pub mod relay;
pub(crate) mod repairs;
pub mod service;
pub mod shell;
pub mod small_disk;
pub mod soak;
pub mod standby;
pub mod storm;
pub mod traffic;
pub(crate) mod wait;
pub mod web;

pub use dns::probe::{Query, Reply};
pub use lab::{Lab, with_lab};
pub use netns::Netns;
pub use node::{AgentOptions, Programs, SdpOptions};
pub use pod::Pod;
pub use process::Program;
pub use wait::{eventually, until};
