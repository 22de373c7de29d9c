//! Runs other programs, and prints their command lines.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};

use crate::repository;

/// A command that runs in the repository's root.
pub(crate) fn command(program: &str, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(args).current_dir(repository::root());
    command
}

/// Prints the command line, runs it with our standard streams, fails if it fails.
pub(crate) fn run(mut command: Command) -> Result<()> {
    println!("  $ {}", line(&command));
    let status = command
        .status()
        .with_context(|| format!("cannot start `{}`", line(&command)))?;
    if !status.success() {
        bail!("`{}` failed ({status})", line(&command));
    }
    Ok(())
}

/// Standard output of a command that must succeed; its standard error is in the error.
pub(crate) fn output(mut command: Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start `{}`", line(&command)))?;
    if !output.status.success() {
        bail!(
            "`{}` failed ({}): {}",
            line(&command),
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Whether the command can be started and succeeds; prints nothing.
pub(crate) fn succeeds(mut command: Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// The command line as a user would type it, with the variables that it sets.
pub(crate) fn line(command: &Command) -> String {
    let mut words = Vec::new();
    for (key, value) in command.get_envs() {
        if let Some(value) = value {
            words.push(format!("{}={:?}", key.display(), value));
        }
    }
    words.push(command.get_program().to_string_lossy().into_owned());
    words.extend(command.get_args().map(|arg| {
        let arg = arg.to_string_lossy();
        if arg.is_empty() || arg.contains(' ') {
            format!("'{arg}'")
        } else {
            arg.into_owned()
        }
    }));
    words.join(" ")
}

/// Fails unless this process is root; `what` needs it.
pub(crate) fn require_root(what: &str) -> Result<()> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let uid = status
        .lines()
        .find_map(|line| line.strip_prefix("Uid:"))
        .and_then(|ids| ids.split_whitespace().nth(1));
    if uid != Some("0") {
        bail!("{what} needs root (network namespaces, eBPF): run the same command as root");
    }
    Ok(())
}

/// Whether a program of this name is in one of the usual directories for binaries.
pub(crate) fn installed(program: &str) -> bool {
    [
        "/usr/sbin",
        "/usr/bin",
        "/sbin",
        "/bin",
        "/usr/local/sbin",
        "/usr/local/bin",
    ]
    .iter()
    .any(|dir| Path::new(dir).join(program).exists())
}
