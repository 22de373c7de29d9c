//! Exports for a VPP vswitch. Nothing here installs them.

pub mod acl;
pub mod sessions;

/// Prefix of our tables' names.
const PREFIX: &str = "contiv-policy-";
