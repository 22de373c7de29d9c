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

pub mod ask;
pub mod cidr_group;
pub(crate) mod closed_namespace;
pub mod cluster;
pub mod compute;
pub mod document;
pub mod egress_firewall;
pub(crate) mod head;
pub mod kinds;
pub mod lint;
pub mod mode;
pub(crate) mod model;
pub mod network_policy;
pub mod parse;
mod prune;
pub mod repository;
pub(crate) mod rule;
pub mod source;
pub mod trace;
pub(crate) mod validate;
