//! `holdfast-sdp`: runs the proxy, or sends a request to running ones.

use std::{ffi::OsString, fmt::Display, process::ExitCode};

use clap::{CommandFactory as _, Parser};
use daemon::command_line::{
    failure::{self, FAILED, USAGE},
    terminal::Screen,
};
use holdfast_sdp::{
    admin, app,
    config::{Config, ConfigError, args::Cli},
    telemetry,
};
use nix::unistd::Uid;

const PROGRAM: &str = "holdfast-sdp";

fn main() -> ExitCode {
    Screen::detect();
    let line: Vec<OsString> = std::env::args_os().collect();
    let cli = match Cli::try_parse_from(&line) {
        Ok(cli) => cli,
        Err(error) => return failure::usage(PROGRAM, &error, &Cli::command(), &line),
    };
    if let Some(command) = &cli.command {
        return match admin::client::run(&cli.settings, command) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => failed(FAILED, &format!("{error:#}")),
        };
    }
    let config = match Config::resolve(line.clone()) {
        Ok(config) => config,
        Err(ConfigError::Usage(error)) => {
            return failure::usage(PROGRAM, &error, &Cli::command(), &line);
        }
        Err(error) => return failed(USAGE, &error),
    };
    let recent_warnings = telemetry::init(&config.flags.log);
    // The proxy changes its user.
    let user = Uid::effective();
    match app::run(config, recent_warnings) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let code = failed(FAILED, &format!("{error:#}"));
            // Root cannot bind a port that another process has either.
            let is_taken = error.is::<app::PortTaken>();
            if !user.is_root() && !is_taken {
                // The kernel's own error rarely shows it.
                let hint = format!(
                    "this process was started by user {user}, not by root: start it as root (it changes \
                     to --user by itself)"
                );
                failure::note(PROGRAM, &hint);
            }
            code
        }
    }
}

fn failed(code: u8, error: &dyn Display) -> ExitCode {
    failure::failed(PROGRAM, code, error)
}
