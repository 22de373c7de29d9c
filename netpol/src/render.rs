//! The meaning of policies in other forms than rules over identities.

pub mod change;
pub mod ruleset;
mod text;
