//! From a plan to the kernel.

pub mod closed;
pub mod conntrack;
pub mod events;
pub mod files;
pub mod interfaces;
pub mod kernel;
pub mod link;
pub mod map_query;
pub mod memory;
mod notes;
pub mod notrack;
pub mod plan;
pub mod program;
pub mod quota;
pub mod root;
pub mod routing;
pub mod upkeep;
