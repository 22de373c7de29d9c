//! `health` and `version`, of both programs.

use std::fmt::Write as _;

use clap::Args;
use serde::Serialize;

/// What `health` checks.
#[derive(Clone, Copy, Debug, Args)]
pub struct HealthArgs {
    /// Only check that the program answers, as a liveness probe does
    #[arg(long)]
    pub live: bool,
}

/// Answer of `health`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Health {
    /// Whether the program is ready or, with `--live`, whether it answers.
    pub healthy: bool,
    /// What is missing, each with its reason.
    pub missing: Vec<String>,
}

impl Health {
    /// The health of a program that answers.
    pub fn live() -> Self {
        Self {
            healthy: true,
            missing: Vec::new(),
        }
    }

    /// The answer as lines of text.
    pub fn text(&self) -> String {
        let first = match self.healthy {
            true => "healthy",
            false => "not ready",
        };
        let mut text = format!("{first}\n");
        for missing in &self.missing {
            let _ = writeln!(text, "{missing}");
        }
        text
    }
}

/// Answer of `version`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Versions {
    /// This program.
    pub program: &'static str,
    /// Its version.
    pub version: &'static str,
    /// Programs that run on this node.
    pub running: Vec<Running>,
}

/// A program that runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Running {
    /// Name of the program, for example a proxy's name.
    pub name: String,
    /// Its process id, in its own PID namespace.
    pub pid: u32,
    /// Its version.
    pub version: String,
}

impl Versions {
    /// The answer as lines of text.
    pub fn text(&self) -> String {
        let mut text = format!("{} {}\n", self.program, self.version);
        for Running { name, pid, version } in &self.running {
            let _ = writeln!(text, "running: {name} {version}, pid {pid}");
        }
        if self.running.is_empty() {
            text.push_str("running: none that answers\n");
        }
        text
    }
}
