//! The default of `--node-name`, and of a relay's `--name`.

/// The host's name, in lower case, as Kubernetes names nodes by default.
pub(super) fn host_name() -> String {
    let name = nix::sys::utsname::uname().ok();
    let name = name.map(|name| name.nodename().to_string_lossy().to_lowercase());
    name.unwrap_or_default()
}
