//! The agent's binary: arguments, log, runtime, exit code.

mod cli;

use std::process::ExitCode;

use agent_cluster::{api::client::ClientError, relay, relay_settings::RelayConfig};
use daemon::{log_filter, one_line::OneLine};
use holdfast_agent::{
    app,
    config::{self, Command, Config, NetpolConfig, ParseError, netpol_args::NetpolCommand},
    netpol,
};
use tokio::runtime::Runtime;

/// Threads for gRPC, admin requests and sources; the core has a thread of its own.
const WORKERS: usize = 2;
/// Lines of libraries that are left out: those that repeat the agent's own, and those that a peer
/// can cause any number of times.
const QUIET: [(&str, &str); 2] = [
    ("kube", "kube_client::client::builder=off"),
    ("h2", "h2::proto::streams=off"),
];

fn main() -> ExitCode {
    shared_maps::user::limit_heap();
    let parsed = match config::parse(std::env::args_os()) {
        Ok(parsed) => parsed,
        Err(ParseError::Usage(error)) => error.exit(),
        Err(error) => return failed(2, &error.to_string()),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .thread_name("agent-rim")
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return failed(1, &format!("cannot start the runtime: {error}")),
    };
    match parsed.cli.command {
        Command::Run(args) => {
            if let Err(reason) = log(&args.log, args.log_json) {
                return failed(2, &reason);
            }
            log_ignored(&parsed.ignored);
            let config = match Config::try_from(*args) {
                Ok(config) => config,
                Err(error) => return failed(2, &error.to_string()),
            };
            needs_root(runtime.block_on(app::run(config)))
        }
        Command::Relay(args) => {
            if let Err(reason) = log(&args.log, args.log_json) {
                return failed(2, &reason);
            }
            log_ignored(&parsed.ignored);
            serve(*args, &runtime)
        }
        Command::Netpol(NetpolCommand::Run(args)) => {
            if let Err(reason) = log(&args.log, args.log_json) {
                return failed(2, &reason);
            }
            log_ignored(&parsed.ignored);
            match NetpolConfig::try_from(*args) {
                Ok(config) => needs_root(runtime.block_on(netpol::app::run(config))),
                Err(error) => failed(2, &error.to_string()),
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
        Err(error) => failed(2, &error.to_string()),
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
    let user = nix::unistd::Uid::effective();
    if result.is_err() && !user.is_root() {
        eprintln!(
            "holdfast-agent: this process runs as user {user}, not as root: start it as root, for \
             example with sudo or as a system service"
        );
    }
    done(result)
}

fn done(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<ClientError>() => failed(2, &explain(&error)),
        Err(error) => failed(1, &explain(&error)),
    }
}

/// The chain of causes, without those that the text already contains.
fn explain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    text
}

fn failed(code: u8, reason: &str) -> ExitCode {
    eprintln!("holdfast-agent: {reason}");
    ExitCode::from(code)
}

fn log(directives: &str, as_json: bool) -> Result<(), String> {
    let filter = log_filter::parse(directives, "holdfast_agent")
        .map_err(|error| format!("--log (HOLDFAST_LOG) {directives:?}: {error}"))?;
    // Unless the filter names the library.
    let is_quiet = |(library, _): &&(&str, &str)| !directives.contains(library);
    let quiet = QUIET.iter().filter(is_quiet);
    let filter = quiet.fold(filter, |filter, (_, directive)| {
        filter.add_directive(directive.parse().expect("a constant directive"))
    });
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(false)
        .with_writer(OneLine(std::io::stderr));
    if as_json {
        log.json().init();
    } else {
        log.init();
    }
    Ok(())
}
