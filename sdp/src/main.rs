//! `holdfast-sdp`: runs the proxy, or sends a request to running ones.

use std::{ffi::OsString, fmt::Display, io, process::ExitCode};

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
    // The user is read here, because the proxy changes its user later.
    let user = Uid::effective();
    match app::run(config, recent_warnings) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let code = failed(FAILED, &failure::causes(&*error));
            if !user.is_root() && !is_taken(&error) {
                // The kernel's error rarely shows that the user is the reason.
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

/// Whether another process has the port or socket. Root cannot bind it either.
fn is_taken(error: &anyhow::Error) -> bool {
    let in_use = |error: &io::Error| error.kind() == io::ErrorKind::AddrInUse;
    let mut causes = error.chain();
    error.is::<app::PortTaken>() || causes.any(|cause| cause.downcast_ref().is_some_and(in_use))
}

fn failed(code: u8, error: &dyn Display) -> ExitCode {
    failure::failed(PROGRAM, code, error)
}
