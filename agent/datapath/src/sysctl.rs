//! Kernel parameters of this network namespace that have to be 1.

use std::{fs, io, path::Path};

/// Where the node's /proc/sys is mounted in a container, as in Cilium.
const MOUNTED: &str = "/host/proc/sys";

/// A parameter that cannot be set.
#[derive(Debug, thiserror::Error)]
#[error("sysctl {name}=1: {source}; set it before the agent starts")]
pub struct SysctlError {
    /// Name with dots, such as `net.ipv4.ip_forward`.
    name: &'static str,
    source: io::Error,
}

/// Whether a parameter is 1. A parameter that the kernel lacks does not count as 1.
pub fn is_one(name: &str) -> bool {
    fs::read_to_string(path_of(name)).is_ok_and(|value| value.trim() == "1")
}

/// Sets a parameter to 1, unless it is 1 already: then it may be read-only.
///
/// # Errors
/// The kernel lacks the parameter, or does not let this process set it.
pub fn set(name: &'static str) -> Result<(), SysctlError> {
    if is_one(name) {
        return Ok(());
    }
    fs::write(path_of(name), "1").map_err(|source| SysctlError { name, source })
}

/// Path of a parameter. In a container /proc/sys is read-only: then the node's is mounted elsewhere.
fn path_of(name: &str) -> String {
    let name = name.replace('.', "/");
    let mounted = format!("{MOUNTED}/{name}");
    if Path::new(&mounted).exists() {
        return mounted;
    }
    format!("/proc/sys/{name}")
}
