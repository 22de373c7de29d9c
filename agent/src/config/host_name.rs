//! The default of `--node-name`, and of a relay's `--name`.

/// The host's name, as Kubernetes calls nodes unless told otherwise: in lower case.
pub(super) fn host_name() -> String {
    let name = nix::sys::utsname::uname().ok();
    let name = name.map(|name| name.nodename().to_string_lossy().to_lowercase());
    name.unwrap_or_default()
}
