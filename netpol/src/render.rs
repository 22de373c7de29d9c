//! The meaning of policies in forms other than rules over identities.

pub mod change;
mod logging;
pub mod nft;
pub mod ruleset;
pub mod tables;
mod text;
pub mod vpp;
