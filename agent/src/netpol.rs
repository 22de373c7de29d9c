//! `netpol run`: NetworkPolicies enforced with nftables instead of eBPF programs.
//!
//! ```text
//!  document_source ─► feed ─► State (the pipeline of crate netpol) ─► enforcer ─► nf_tables
//!                              ▲            │                          ▲   └─► conntrack
//!  holdfast-cni ─► plugin ─► attached ─┘    │                   table events
//!                  ways (routes), surroundings
//!                                           └─► admin, metrics, exports (files for VPP)
//! ```
//! The table stays in force when the process ends, and until the next one has read every kind.

mod admin;
pub mod app;
mod attached;
mod attached_file;
mod drops;
mod enforcer;
mod export_task;
mod exports;
mod feed;
mod handover;
pub mod metrics;
pub mod model;
pub mod objects;
mod owners;
mod plugin;
mod service;
mod state;
mod surroundings;
mod unenforced;
mod view;
mod ways;
mod why;

pub(crate) use self::handover::{remove_table, take_over};
