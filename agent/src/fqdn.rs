//! DNS names: the learned pairs, how long they are valid, and the labels that follow from them.

pub mod cache;
pub mod cleaned;
pub mod gc;
pub mod names;
pub mod pre_cache;
pub mod refused;
