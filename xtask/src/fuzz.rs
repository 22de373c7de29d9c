//! `cargo xtask fuzz`: the fuzzers of `fuzz/`, each for a number of seconds.
//!
//! Inputs that are found stay in the target directory. Inputs worth keeping go to
//! `fuzz/corpus/<target>/`, where every test run replays them.

use std::{fs, time::Duration};

use anyhow::{Context as _, Result, bail};

use crate::{process, repository, setup::CargoTool, workspace};

const CARGO_FUZZ: CargoTool = CargoTool {
    package: "cargo-fuzz",
    verb: "fuzz",
    version: "0.13.2",
    why: "builds and runs the fuzzers",
};
const PACKAGE: &str = "holdfast-fuzz";

/// Which fuzzers found nothing, and which found something.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    pub(crate) clean: Vec<String>,
    pub(crate) failed: Vec<String>,
}

/// Runs the fuzzer `only`, or all fuzzers.
pub(crate) fn run(only: Option<&str>, each: Duration) -> Result<Findings> {
    let metadata = workspace::metadata(false)?;
    let all: Vec<String> = workspace::targets(&metadata, PACKAGE, "bin")
        .map(str::to_owned)
        .collect();
    let chosen: Vec<&String> = all
        .iter()
        .filter(|name| only.is_none_or(|only| only == name.as_str()))
        .collect();
    if chosen.is_empty() {
        bail!("there is no such fuzzer; there are: {}", all.join(", "));
    }
    tools()?;
    let found = workspace::target_dir()?.join("fuzz");
    process::run(cargo_fuzz("build")).context("building the fuzzers")?;
    let mut findings = Findings::default();
    for name in chosen {
        let new = found.join(name);
        fs::create_dir_all(&new).with_context(|| format!("making {}", new.display()))?;
        let mut fuzz = cargo_fuzz("run");
        fuzz.arg(name).arg(&new).arg(corpus(name)).args([
            "--".to_owned(),
            format!("-max_total_time={}", each.as_secs()),
            "-print_final_stats=1".to_owned(),
        ]);
        match process::run(fuzz) {
            Ok(()) => findings.clean.push(name.clone()),
            Err(error) => {
                println!(
                    "fuzzer {name}: {error:#}; the input is in fuzz/artifacts/{name}: mend what \
                     it shows and keep it in fuzz/corpus/{name}"
                );
                findings.failed.push(name.clone());
            }
        }
    }
    Ok(findings)
}

fn corpus(name: &str) -> std::path::PathBuf {
    repository::root().join("fuzz/corpus").join(name)
}

fn cargo_fuzz(verb: &str) -> std::process::Command {
    let mut fuzz = process::command("rustup", &["run", "nightly", "cargo", "fuzz", verb]);
    // No address sanitizer: the fuzzed code has no `unsafe`, and the sanitizer would double the
    // build time.
    fuzz.args(["--fuzz-dir", "fuzz", "--features", "libfuzzer"])
        .args(["--sanitizer", "none"])
        .current_dir(repository::root())
        .env_remove("RUSTUP_TOOLCHAIN")
        // Each fuzzer links nearly everything, so optimising across crates would take minutes for
        // each.
        .env("CARGO_PROFILE_RELEASE_LTO", "off")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16");
    fuzz
}

fn tools() -> Result<()> {
    let nightly = process::command("rustup", &["run", "nightly", "rustc", "-V"]);
    if !process::succeeds(nightly) {
        bail!("fuzzing needs a nightly compiler: `rustup toolchain install nightly`");
    }
    CARGO_FUZZ.install()
}
