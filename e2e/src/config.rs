//! Settings of the lab from the environment.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// Values of the chart `holdfast`.
const CHART: &str = include_str!("../../charts/holdfast/values.yaml");

/// Whether a failed lab stays up (`HOLDFAST_KEEP=1`).
pub fn keep() -> bool {
    variable("HOLDFAST_KEEP").is_some_and(|value| value != "0")
}

/// `holdfast-sdp` of the previous version (`HOLDFAST_PREVIOUS_SDP`).
pub fn previous_sdp() -> Result<PathBuf> {
    previous("HOLDFAST_PREVIOUS_SDP")
}

/// `holdfast-agent` of the previous version (`HOLDFAST_PREVIOUS_AGENT`).
pub fn previous_agent() -> Result<PathBuf> {
    previous("HOLDFAST_PREVIOUS_AGENT")
}

fn previous(name: &str) -> Result<PathBuf> {
    let path = variable(name).map(PathBuf::from);
    path.with_context(|| {
        format!("{name} is not set: `cargo xtask test --tier netns` builds the previous version and sets it")
    })
}

/// Directory that guests share, one after another (`HOLDFAST_DISK`).
pub fn disk() -> Option<PathBuf> {
    variable("HOLDFAST_DISK").map(PathBuf::from)
}

/// Name of the lab, the same in each guest (`HOLDFAST_LAB`). Without it each lab has a name of its own.
pub(crate) fn lab_name() -> Option<String> {
    variable("HOLDFAST_LAB")
}

/// Seed of random choices: `HOLDFAST_SEED`, or the clock.
pub fn seed() -> u64 {
    let given = variable("HOLDFAST_SEED").and_then(|seed| seed.parse().ok());
    given.unwrap_or_else(rand::random)
}

/// How many pods a test of the tier `cri` starts: `HOLDFAST_CRI_PODS`, or `usual`.
pub fn cri_pods(usual: u8) -> u8 {
    let given = variable("HOLDFAST_CRI_PODS").and_then(|pods| pods.parse().ok());
    given.unwrap_or(usual)
}

/// Path of a program under test: `HOLDFAST_BIN_DIR`, or the directory this
/// program was built into.
pub fn program(name: &str) -> Result<PathBuf> {
    let directory = match variable("HOLDFAST_BIN_DIR") {
        Some(directory) => PathBuf::from(directory),
        None => {
            let own = std::env::current_exe().context("path of this program")?;
            let directory = own.parent().context("directory of this program")?;
            // Test programs lie one level deeper than the binaries.
            match directory.ends_with("deps") {
                true => directory
                    .parent()
                    .context("directory above deps")?
                    .to_owned(),
                false => directory.to_owned(),
            }
        }
    };
    let path = directory.join(name);
    ensure!(
        path.exists(),
        "{} is missing: build it first (cargo xtask test does), or set HOLDFAST_BIN_DIR",
        path.display()
    );
    Ok(path)
}

/// A value of the chart `holdfast` that is true or false.
pub(crate) fn chart_value(key: &str) -> Result<bool> {
    let values: Value = serde_yaml_ng::from_str(CHART)?;
    let value = values[key].as_bool();
    value.with_context(|| format!("charts/holdfast/values.yaml: {key} is neither true nor false"))
}

#[expect(
    clippy::disallowed_methods,
    reason = "the lab's one reader of the environment"
)]
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}
