//! Subcommands of cargo that are built here.

use anyhow::{Context as _, Result};

use crate::{process, progress::step};

/// A subcommand of cargo, by the name of its package.
pub(crate) struct CargoTool {
    pub(crate) package: &'static str,
    /// Name of the subcommand, as in `cargo <verb>`.
    pub(crate) verb: &'static str,
    pub(crate) version: &'static str,
    pub(crate) why: &'static str,
}

/// The newest version that the pinned compiler can build.
pub(super) const CARGO_DENY: CargoTool = CargoTool {
    package: "cargo-deny",
    verb: "deny",
    version: "0.20.2",
    why: "checks licences and sources of dependencies",
};

impl CargoTool {
    /// Builds the tool unless this version is installed.
    pub(crate) fn install(&self) -> Result<()> {
        let Self {
            package,
            verb,
            version,
            why,
        } = *self;
        let found = process::output(process::command("cargo", &[verb, "--version"]));
        if found.is_ok_and(|found| found.split_whitespace().nth(1) == Some(version)) {
            step(&format!("{package} {version} is there"), why);
            return Ok(());
        }
        step(
            &format!("build {package} {version}"),
            &format!("{why}; minutes"),
        );
        let args = [
            "install",
            package,
            "--version",
            version,
            "--locked",
            "--force",
        ];
        process::run(process::command("cargo", &args))
            .with_context(|| format!("building {package}"))
    }
}
