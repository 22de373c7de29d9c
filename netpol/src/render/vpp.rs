//! Exports for a VPP vswitch. Nothing here installs them.

pub mod acl;
pub mod sessions;

/// Beginning of the names of our tables.
const PREFIX: &str = "contiv-policy-";
