//! Policy: documents, rules, and who may talk to whom.
//!
//! ```text
//!  text ─► parse (+ validate) ─► rule ─► repository ─► model (who may talk to whom, on what)
//!                                                        ├─► compute: policy map entries
//!                                                        └─► compute: DNS rules
//! ```

pub mod ask;
pub mod cluster;
pub mod compute;
pub mod footgun;
pub mod mode;
pub mod model;
pub mod parse;
pub mod repository;
pub mod rule;
pub mod source;
pub mod trace;
pub mod validate;
