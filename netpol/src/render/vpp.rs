//! Exports for a VPP vswitch. Nothing here installs them.

pub mod acl;
pub mod sessions;

/// The name that every table of ours has at its beginning.
const PREFIX: &str = "contiv-policy-";
