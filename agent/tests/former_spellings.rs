//! Manifests and units of earlier versions start the newer programs: former spellings have their effect,
//! and no help shows them.

use std::{ffi::OsString, fs};

use clap::{Command as ClapCommand, CommandFactory as _, Parser as _};
use daemon::command_line::{
    log_args::{LogArgs, LogFormat},
    output::Output,
};
use holdfast_agent::config::{self, Cli, Command, netpol_args::NetpolCommand};
use holdfast_sdp::config::args::{Cli as SdpCli, Command as SdpCommand};

/// Commands of the agent that run, with the flags that they need.
const RUNNING: [&[&str]; 3] = [&["run"], &["relay"], &["netpol", "run"]];

fn log_of(words: &[&str], flags: &[&str]) -> LogArgs {
    let line = ["holdfast-agent"].iter().chain(words).chain(flags);
    let parsed = config::parse(line.map(OsString::from)).expect("an accepted line");
    match parsed.cli.command {
        Command::Run(args) => args.log,
        Command::Relay(args) => args.log,
        Command::Netpol(NetpolCommand::Run(args)) => args.log,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_agents_flags_of_the_log_have_their_former_names_too() {
    for words in RUNNING {
        let log = log_of(words, &["--log=debug", "--log-json"]);
        assert_eq!(log.log_level, "debug", "{words:?}");
        assert_eq!(log.format(), LogFormat::Json, "{words:?}");
        assert_eq!(log_of(words, &[]).format(), LogFormat::Text, "{words:?}");
    }
}

#[test]
fn a_former_flag_overrides_a_file_as_the_present_one_does() {
    let dir = tempfile::tempdir().unwrap();
    let write = |key: &str, text: &str| fs::write(dir.path().join(key), text).unwrap();
    // A ConfigMap that agents and proxies share.
    write("log-level", "info,holdfast_sdp=debug");
    write("log-format", "text");
    let file = format!("--config-dir={}", dir.path().display());
    let log = log_of(&["run"], &[&file, "--log=warn", "--log-json"]);
    assert_eq!(
        (log.log_level.as_str(), log.format()),
        ("warn", LogFormat::Json)
    );
    fs::remove_file(dir.path().join("log-level")).unwrap();
    write("log", "error");
    write("log-json", "true");
    let log = log_of(&["run"], &[&file]);
    assert_eq!(
        (log.log_level.as_str(), log.format()),
        ("error", LogFormat::Json)
    );
}

#[test]
fn the_proxys_probes_and_requests_have_their_former_names_too() {
    let command = |line: &[&str]| {
        let line = ["holdfast-sdp"].iter().chain(line);
        SdpCli::try_parse_from(line).unwrap().command.unwrap()
    };
    assert!(matches!(
        command(&["ready"]),
        SdpCommand::Health { what, .. } if !what.live
    ));
    assert!(matches!(command(&["alive"]), SdpCommand::Alive));
    assert!(matches!(
        command(&["status", "-o", "text"]),
        SdpCommand::Status(form) if form.output == Output::Table
    ));
    assert!(matches!(
        command(&["explain", "10.0.1.5", "www.example.com", "--tcp", "--port", "5353"]),
        SdpCommand::Explain(args) if args.tcp && args.port.number == 5353
    ));
}

#[test]
fn no_help_shows_a_former_spelling() {
    for mut program in [Cli::command(), SdpCli::command()] {
        program.build();
        let mut help = String::new();
        helps(&program, &mut help);
        for former in ["--log ", "--log-json", "  ready", "alive", "--tcp"] {
            assert!(!help.contains(former), "{former}: {help}");
        }
    }
}

fn helps(command: &ClapCommand, text: &mut String) {
    text.push_str(&command.clone().render_long_help().to_string());
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        helps(sub, text);
    }
}
