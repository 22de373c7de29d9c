//! DNS names: what was learned, for how long, and which labels follow from it.

pub mod cache;
pub mod cleaned;
pub mod gc;
pub mod names;
pub mod pre_cache;
pub mod refused;
