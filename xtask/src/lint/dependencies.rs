//! Licences, sources, bans and duplicates of dependencies, as `deny.toml` has them.

use anyhow::{Result, bail};

use crate::process;

/// Runs cargo-deny. Advisories are not checked, because they need a database from the network.
pub(super) fn check() -> Result<()> {
    if !process::succeeds(process::command("cargo", &["deny", "--version"])) {
        bail!("cargo-deny is not installed: run `cargo xtask setup --only lint`");
    }
    process::run(process::command(
        "cargo",
        &[
            "deny",
            "--log-level=warn",
            "--locked",
            "check",
            "--hide-inclusion-graph",
            "bans",
            "licenses",
            "sources",
        ],
    ))
}
