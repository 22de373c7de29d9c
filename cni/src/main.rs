//! The CNI plugin: the last one of a chain. It asks the agent of this node to put a pod's interface
//! under policy, and the pod starts once that is done.
//!
//! ```text
//!  container runtime ─► base plugins ─► holdfast-cni ─► /run/holdfast/cni.sock ─► holdfast-agent
//!                       (interface)      CNI_*, JSON     POST /v1/cni
//! ```
//! Specification: <https://www.cni.dev/docs/spec/>, 0.3.0 to 1.1.0. While no agent answers, ADD
//! fails with code 11, so a pod does not start without policy. DEL and STATUS always succeed:
//! otherwise pods could not end, and the node would not be ready.

mod agent;
mod command;
mod config;
mod failure;
mod request;

use std::{
    io::{Read as _, Write as _},
    process::ExitCode,
};

use command::{Command, Environment};
use config::Config;
use failure::Failure;
use serde_json::json;

/// Versions of the CNI specification that the plugin supports, ascending.
const VERSIONS: [&str; 5] = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];
/// Maximum bytes of the configuration.
const INPUT: u64 = 4 << 20;

fn main() -> ExitCode {
    if std::env::args().nth(1).as_deref() == Some("--version") {
        println!("holdfast-cni {}", env!("CARGO_PKG_VERSION"));
        return ExitCode::SUCCESS;
    }
    let mut input = String::new();
    let read = std::io::stdin().take(INPUT).read_to_string(&mut input);
    let config = read.map_err(|error| Failure::input(&error.to_string()));
    let config = config.and_then(|_| Config::parse(&input));
    let version = config.as_ref().map(|config| config.version.clone());
    let version = version.unwrap_or_else(|_| VERSIONS[1].to_owned());
    let outcome = config.and_then(|config| run(&config));
    let (text, code) = match outcome {
        Ok(text) => (text, ExitCode::SUCCESS),
        Err(failure) => (failure.json(&version), ExitCode::FAILURE),
    };
    // If this fails, the runtime has ended.
    let _closed = std::io::stdout().write_all(text.as_bytes());
    code
}

/// Carries out the command. Returns the text for standard output.
fn run(config: &Config) -> Result<String, Failure> {
    let environment = Environment::read(variable)?;
    if environment.command == Command::Version {
        let answer = json!({"cniVersion": VERSIONS[4], "supportedVersions": VERSIONS});
        return Ok(answer.to_string());
    }
    config.check_version()?;
    match environment.command {
        Command::Add => add(config, &environment),
        Command::Check => {
            let body = request::check(&environment);
            agent::once(config, &body).map(|()| String::new())
        }
        // The pod must be able to end, and the agent drops endpoints whose namespace is gone.
        Command::Del => {
            let _away = agent::once(config, &request::delete(&environment));
            Ok(String::new())
        }
        Command::Gc => {
            if let Some(body) = request::collect(config) {
                let _away = agent::once(config, &body);
            }
            Ok(String::new())
        }
        Command::Status | Command::Version => Ok(String::new()),
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "a plugin's parameters are its environment"
)]
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn add(config: &Config, environment: &Environment) -> Result<String, Failure> {
    let body = request::add(config, environment)?;
    match agent::insist(config, body) {
        Err(failure) if failure.passes() && config.is_open(environment.namespace()) => {}
        other => other?,
    }
    config.result()
}
