//! Policy: documents, rules, and which peers may communicate.
//!
//! ```text
//!  text ─► parse ─► kinds (a reader for each kind) ─► document
//!                                                      │ rules
//!                                                      ▼
//!                                                   repository ─► model (which peers, which ports)
//!                                                                   ├─► compute: policy map entries
//!                                                                   └─► compute: DNS rules
//! ```

pub(crate) mod ask;
pub(crate) mod cidr_group;
pub mod cluster;
pub(crate) mod compute;
pub mod document;
pub(crate) mod egress_firewall;
pub(crate) mod kinds;
pub(crate) mod lint;
pub(crate) mod mode;
pub(crate) mod model;
pub(crate) mod network_policy;
pub mod parse;
mod prune;
pub(crate) mod repository;
pub(crate) mod rule;
pub mod source;
pub(crate) mod trace;
pub(crate) mod validate;
