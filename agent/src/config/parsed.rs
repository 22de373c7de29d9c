//! The settings of flags, for tests.

use clap::Parser as _;

use super::{Cli, Command, Config, RunArgs};

/// The configuration of `holdfast-agent run` with these flags, or the message that refuses them.
pub(super) fn run(flags: &[&str]) -> Result<Config, String> {
    Config::try_from(args(flags)?).map_err(|error| error.to_string())
}

/// The flags of `holdfast-agent run` before they are checked against each other.
pub(super) fn args(flags: &[&str]) -> Result<RunArgs, String> {
    let line = ["holdfast-agent", "run"].iter().chain(flags);
    let cli = Cli::try_parse_from(line).map_err(|error| error.to_string())?;
    let Command::Run(args) = cli.command else {
        panic!("not run");
    };
    Ok(*args)
}
