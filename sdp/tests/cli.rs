//! The command line: exit codes, and errors that name what is wrong.

use std::{
    fs,
    process::{Command, Output},
};

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_holdfast-sdp"))
        .args(arguments)
        .env_clear()
        .output()
        .expect("holdfast-sdp runs")
}

fn fails(code: i32, arguments: &[&str], names: &str) {
    let output = run(arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
    assert!(
        error.contains(names),
        "{arguments:?} does not name {names}: {error}"
    );
}

#[test]
fn wrong_usage_ends_with_2_and_names_the_flag() {
    fails(2, &["--tofqdns-proxy-port", "0"], "--tofqdns-proxy-port");
    fails(2, &["--drain-timeout", "soon"], "--drain-timeout");
    fails(2, &["--agent-address", "/run/x.sock"], "unix:///PATH");
    fails(
        2,
        &["--enable-ipv4=false", "--enable-ipv6=false"],
        "--enable-ipv4",
    );
    fails(2, &["--name", "a/b"], "--name");
    fails(2, &["--log-level", "a=b=c"], "--log-level");
    fails(2, &["--no-such-flag"], "--no-such-flag");
    fails(2, &["explain", "10.0.0.1"], "NAME");
}

#[test]
fn an_unknown_key_in_a_file_ends_with_2_and_is_named() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("sdp.yaml");
    fs::write(&file, "tofqdns-proxy-prot: 10094\n").expect("written");
    fails(
        2,
        &["--config", file.to_str().expect("UTF-8")],
        "tofqdns-proxy-prot",
    );
    fails(2, &["--config", "/nowhere/sdp.yaml"], "/nowhere/sdp.yaml");
    fails(2, &["--config-dir", "/nowhere"], "/nowhere");
}

#[test]
fn a_request_to_a_missing_proxy_ends_with_1() {
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("none.sock");
    let socket = socket.to_str().expect("UTF-8");
    for verb in ["status", "drain", "policy", "health"] {
        fails(1, &[verb, "--admin-socket", socket], "none.sock");
    }
    fails(
        1,
        &["explain", "10.0.0.1", "a.com", "--admin-socket", socket],
        "none.sock",
    );
}

#[test]
fn help_teaches() {
    let output = run(&["--help"]);
    assert!(output.status.success());
    let text = String::from_utf8_lossy(&output.stdout);
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "Examples:",
        "Exit codes:",
        "explain",
        "--tofqdns-proxy-port",
        "default: 10094",
    ] {
        assert!(text.contains(part), "--help lacks {part}");
    }
}

#[test]
fn a_misspelt_level_of_the_log_is_an_error_from_each_place() {
    let dir = tempfile::tempdir().expect("a directory");
    fs::write(dir.path().join("log-level"), "debgu\n").expect("written");
    for place in ["flag", "environment", "directory"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_holdfast-sdp"));
        // A program that accepts the level ends at this address, which no interface has.
        command.env_clear().arg("--metrics-address=192.0.2.1:9961");
        match place {
            "flag" => command.arg("--log-level=debgu"),
            "environment" => command.env("HOLDFAST_LOG_LEVEL", "debgu"),
            _ => command.arg("--config-dir").arg(dir.path()),
        };
        let output = command.output().expect("holdfast-sdp runs");
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{place}: {error}");
        let where_it_is = match place {
            "flag" => "--log-level",
            "environment" => "environment variable HOLDFAST_LOG_LEVEL",
            _ => "/log-level, key \"log-level\"",
        };
        for part in [where_it_is, "`debgu`", "warn"] {
            assert!(error.contains(part), "{place}: {error}");
        }
    }
}
