//! The meaning of policies in other forms than rules over identities.

pub mod change;
pub mod nft;
pub mod ruleset;
mod text;
