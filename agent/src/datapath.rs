//! From a plan to the kernel.

pub mod plan;
