//! From a plan to the kernel.

pub mod memory;
pub mod plan;
