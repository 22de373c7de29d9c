//! From a plan to the kernel.

pub mod closed;
pub mod conntrack;
pub mod deny_response;
pub mod events;
pub mod features;
pub mod files;
pub mod filter;
pub mod group;
pub mod hook;
pub mod interfaces;
pub mod kernel;
mod kernel_layout;
pub mod nf_tables;
pub mod nftables;
mod notes;
pub mod packet_log;
pub mod program;
pub mod quota;
pub mod root;
mod route;
pub mod route_query;
pub mod routing;
mod slots;
pub mod sysctl;
pub mod tracked;
pub mod unclaimed;
pub mod upkeep;
