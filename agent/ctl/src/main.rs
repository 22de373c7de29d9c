//! The agent's binary: arguments, log, runtime, exit code.

mod cli;

use std::{ffi::OsString, fmt::Display, process::ExitCode};

use agent_cluster::{api::client::ClientError, relay, relay_settings::RelayConfig};
use daemon::command_line::{
    failure::{self, FAILED, USAGE},
    log_args::LogArgs,
    terminal::Screen,
};
use holdfast_agent::{
    app,
    config::{self, Command, Config, NetpolConfig, ParseError, netpol_args::NetpolCommand},
    netpol,
};
use tokio::runtime::Runtime;
use tracing_subscriber::{Layer as _, layer::SubscriberExt as _, util::SubscriberInitExt as _};

const PROGRAM: &str = "holdfast-agent";
/// Threads for gRPC, admin requests and sources; the core has a thread of its own.
const WORKERS: usize = 2;
/// Log lines of libraries that are left out, because they repeat the agent's own, or because a peer can cause any
/// number of them.
const QUIET: [(&str, &str); 2] = [
    ("kube", "kube_client::client::builder=off"),
    ("h2", "h2::proto::streams=off"),
];

fn main() -> ExitCode {
    shared_maps::user::limit_heap();
    Screen::detect();
    let line: Vec<OsString> = std::env::args_os().collect();
    let parsed = match config::parse(line.clone()) {
        Ok(parsed) => parsed,
        Err(ParseError::Usage(error)) => {
            return failure::usage(PROGRAM, &error, &config::command(), &line);
        }
        Err(error) => return failed(USAGE, &error),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .thread_name("agent-rim")
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return failed(FAILED, &format!("cannot start the runtime: {error}")),
    };
    match parsed.cli.command {
        Command::Run(args) => {
            log(&args.log);
            log_ignored(&parsed.ignored);
            let config = match Config::try_from(*args) {
                Ok(config) => config,
                Err(error) => return failed(USAGE, &error),
            };
            needs_root(runtime.block_on(app::run(config, parsed.settings)))
        }
        Command::Relay(args) => {
            log(&args.log);
            log_ignored(&parsed.ignored);
            serve(*args, &runtime)
        }
        Command::Netpol(NetpolCommand::Run(args)) => {
            log(&args.log);
            log_ignored(&parsed.ignored);
            match NetpolConfig::try_from(*args) {
                Ok(config) => needs_root(runtime.block_on(netpol::app::run(config))),
                Err(error) => failed(USAGE, &error),
            }
        }
        command @ (Command::Bpf(_) | Command::Cleanup(_)) => {
            needs_root(runtime.block_on(cli::run(command)))
        }
        command => done(runtime.block_on(cli::run(command))),
    }
}

fn serve(args: config::RelayArgs, runtime: &Runtime) -> ExitCode {
    match RelayConfig::try_from(args) {
        Ok(config) => done(runtime.block_on(relay::start::run(config))),
        Err(error) => failed(USAGE, &error),
    }
}

fn log_ignored(keys: &[String]) {
    if !keys.is_empty() {
        let keys = keys.join(", ");
        tracing::info!("--config-dir: keys of other programs, ignored: {keys}");
    }
}

/// Adds to a failure that the process is not root: the kernel's own error rarely shows it.
fn needs_root(result: anyhow::Result<()>) -> ExitCode {
    let failed = result.is_err();
    let code = done(result);
    let user = nix::unistd::Uid::effective();
    if failed && !user.is_root() {
        let hint = format!(
            "this process runs as user {user}, not as root: start it as root, for example with sudo or \
             as a system service"
        );
        failure::note(PROGRAM, &hint);
    }
    code
}

fn done(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<ClientError>() => failed(USAGE, &failure::causes(&*error)),
        Err(error) => failed(FAILED, &failure::causes(&*error)),
    }
}

fn failed(code: u8, error: &dyn Display) -> ExitCode {
    failure::failed(PROGRAM, code, error)
}

fn log(args: &LogArgs) {
    // A library that the filter names keeps its lines.
    let is_quiet = |(library, _): &&(&str, &str)| !args.log_level.contains(library);
    let quiet = QUIET.iter().filter(is_quiet);
    let filter = quiet.fold(args.filter(), |filter, (_, directive)| {
        filter.add_directive(directive.parse().expect("a constant directive"))
    });
    tracing_subscriber::registry()
        .with(args.lines().with_filter(filter))
        .init();
}
