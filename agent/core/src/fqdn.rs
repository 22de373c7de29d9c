//! DNS names: the learned pairs, how long they are valid, and the labels that follow from them.

pub(crate) mod cache;
pub mod cleaned;
pub(crate) mod embedded;
pub(crate) mod firewall_names;
pub(crate) mod gc;
pub(crate) mod longest;
pub mod names;
pub mod pre_cache;
pub mod refused;
pub(crate) mod resolved;
pub mod servers;
