//! From a plan to the kernel.

pub mod closed;
pub mod conntrack;
pub mod deny_response;
pub mod events;
pub mod features;
pub mod files;
pub(crate) mod filter;
pub mod group;
pub(crate) mod hook;
pub(crate) mod interfaces;
pub mod kernel;
mod kernel_layout;
pub mod nftables;
mod notes;
pub(crate) mod program;
pub(crate) mod quota;
pub(crate) mod root;
mod route;
pub mod routing;
mod slots;
pub mod upkeep;
