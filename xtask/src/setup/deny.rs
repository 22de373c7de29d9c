//! cargo-deny, which lint calls.

use anyhow::{Context as _, Result};

use super::step;
use crate::process;

/// The newest that the pinned compiler takes.
const CARGO_DENY: &str = "0.20.2";

/// Builds it unless this version is there.
pub(super) fn install() -> Result<()> {
    let found = process::output(process::command("cargo", &["deny", "--version"]));
    if found.is_ok_and(|found| found.split_whitespace().nth(1) == Some(CARGO_DENY)) {
        step(
            &format!("cargo-deny {CARGO_DENY} is there"),
            "checks licences and sources of dependencies",
        );
        return Ok(());
    }
    step(
        &format!("build cargo-deny {CARGO_DENY}"),
        "checks licences and sources of dependencies; two minutes on two cores",
    );
    process::run(process::command(
        "cargo",
        &[
            "install",
            "cargo-deny",
            "--version",
            CARGO_DENY,
            "--locked",
            "--force",
        ],
    ))
    .context("building cargo-deny")
}
