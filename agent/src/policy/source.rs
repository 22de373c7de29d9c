//! Where policy documents come from: today a directory.

pub mod dir;
pub mod last_good;
