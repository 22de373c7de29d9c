//! Policy: documents, rules, and who may talk to whom.

pub mod parse;
pub mod source;
