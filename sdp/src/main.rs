//! `holdfast-sdp`: runs the proxy, or sends a request to running ones.

use std::process::ExitCode;

use clap::Parser;
use holdfast_sdp::{
    admin, app,
    config::{Config, args::Cli},
    telemetry,
};

const FAILED: u8 = 1;
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Some(command) = &cli.command {
        return match admin::client::run(&cli.settings, command) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => fail(FAILED, &format!("{error:#}")),
        };
    }
    let config = match Config::resolve(std::env::args_os()) {
        Ok(config) => config,
        Err(error) => return fail(USAGE, &error),
    };
    let recent_warnings = match telemetry::init(&config.flags.log_level, config.flags.log_format) {
        Ok(recent_warnings) => recent_warnings,
        Err(error) => return fail(USAGE, &error),
    };
    match app::run(config, recent_warnings) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let code = fail(FAILED, &format!("{error:#}"));
            let user = nix::unistd::Uid::effective();
            if !user.is_root() {
                // The kernel's own error rarely shows it.
                eprintln!(
                    "holdfast-sdp: this process runs as user {user}, not as root: start it as \
                     root (it changes to --user by itself)"
                );
            }
            code
        }
    }
}

fn fail(code: u8, error: &dyn std::fmt::Display) -> ExitCode {
    eprintln!("holdfast-sdp: {error}");
    ExitCode::from(code)
}
