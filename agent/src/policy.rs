//! Policy: documents, rules, and which peers may communicate.
//!
//! ```text
//!  text ─► parse (+ validate) ─► rule ─► repository ─► model (which peers, on which ports)
//!                                                        ├─► compute: policy map entries
//!                                                        └─► compute: DNS rules
//! ```

pub mod ask;
pub mod cluster;
pub mod compute;
pub mod footgun;
pub mod mode;
pub mod model;
mod network_policy;
pub mod parse;
pub mod repository;
pub mod rule;
pub mod source;
pub mod trace;
pub mod validate;
