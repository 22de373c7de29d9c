//! The meaning of policies in other forms than rules over identities.

pub mod ruleset;
pub mod tables;
pub mod vpp;
