//! Runs small system commands (`ip`, `sysctl`). Errors name the command.

use std::io::Write;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Runs `program` and returns its standard output. An error contains the command line and its
/// output.
pub fn run(program: &str, arguments: &[&str]) -> Result<String> {
    finish(Command::new(program).args(arguments))
}

/// Runs a prepared command as [`run`] does.
pub fn finish(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("start {command:?} (is it installed? cargo xtask setup)"))?;
    if !output.status.success() {
        bail!(
            "{command:?}: {}: {}{}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim(),
            String::from_utf8_lossy(&output.stdout).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs `program` with `input` on its standard input.
pub fn feed(command: &mut Command, input: &str) -> Result<String> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {command:?}"))?;
    child
        .stdin
        .take()
        .context("standard input")?
        .write_all(input.as_bytes())?;
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!(
            "{command:?}: {}\n{input}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
