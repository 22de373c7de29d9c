//! From a plan to the kernel.

pub mod files;
pub mod memory;
pub mod plan;
