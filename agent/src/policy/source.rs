//! Where policy documents come from: today a directory.

pub mod dir;
