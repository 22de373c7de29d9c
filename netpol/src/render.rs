//! The meaning of policies in other forms than rules over identities.

pub mod change;
mod logging;
pub mod nft;
pub mod ruleset;
mod text;
