//! The Holdfast agent as a library.
//!
//! ```text
//!  policy dir, endpoint dir, CLI ─┐
//!  mappings (gRPC, built-in proxy) ├─► core (one thread) ─► plan ─► datapath ─► kernel maps
//!  timers, conntrack liveness     ─┘        │ commit
//!                                           ├─► rules, results, revocations ─► proxies
//!                                           └─► snapshots ─► admin, metrics
//! ```

pub mod admin;
pub mod app;
pub mod cleanup;
pub mod cni;
pub mod config;
pub(crate) mod dir_writers;
pub(crate) mod dnsproxy;
pub(crate) mod document_dir;
pub(crate) mod document_source;
pub mod endpoint;
pub mod epoch;
pub mod events;
pub mod grpc;
pub(crate) mod health;
pub mod high_scale;
pub mod identities;
pub(crate) mod lane;
pub mod listener;
pub(crate) mod liveness;
pub mod metrics;
pub(crate) mod netlink_events;
pub(crate) mod netns_lock;
pub mod netpol;
pub(crate) mod node;
pub mod owner;
pub(crate) mod ownership;
pub mod policy_dir;
pub mod proxies;
pub(crate) mod refusal;
pub mod resolver;
pub mod restore;
pub mod runner;
pub(crate) mod standby;
pub mod watched_dir;
