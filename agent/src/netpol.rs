//! `netpol run`: NetworkPolicies enforced with nftables, without programs.
//!
//! ```text
//!  document_source ─► feed ─► State (the pipeline of crate netpol) ─► enforcer ─► nf_tables
//!                              ▲            │                          ▲   └─► conntrack
//!                  ways (routes), surroundings                   table events
//!                                           └─► admin, metrics
//! ```
//! The table stays in force when the process ends, and until the next one has read every kind.

mod admin;
pub mod app;
mod drops;
mod enforcer;
mod feed;
mod handover;
pub mod metrics;
pub mod model;
pub mod objects;
mod owners;
mod state;
mod surroundings;
mod unenforced;
mod view;
mod ways;

pub(crate) use self::handover::{remove_table, take_over};
