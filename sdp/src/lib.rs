//! The standalone DNS proxy (SDP) as a library.
//!
//! ```text
//!  packet ─► listener ─► proxy (query) ─► dns_wire::query ─► resolve (client, server) ─► dns_policy::table
//!                          │                                          allowed │
//!                          │                                     upstream ◄───┘
//!                          └─► proxy (answer) ─► dns_wire::answer ─► mapping ─► reply
//!                                                                  │ gRPC, or in process
//!                                                                  ▼ agent
//!  backwards only as data: rule snapshots (link → dns_policy::table), results and leases (link → mapping)
//! ```

pub mod admin;
pub mod app;
mod arena;
pub mod config;
pub(crate) mod drain;
pub mod gate;
pub mod journal;
pub(crate) mod kept_rules;
pub mod link;
pub mod listener;
pub mod mapping;
pub mod maps;
#[cfg(test)]
mod memory_table;
pub mod metrics;
pub mod privileges;
pub mod proxy;
pub mod query;
pub(crate) mod query_log;
pub mod query_report;
pub mod ready;
pub(crate) mod recent_warnings;
pub(crate) mod regular_file;
pub mod resolve;
pub mod restore;
pub mod rules_journal;
pub(crate) mod shared_state;
pub(crate) mod shared_tasks;
pub mod sink;
mod socket;
pub mod stats;
pub mod steering;
pub mod telemetry;
pub mod transparent;
mod upstream;
