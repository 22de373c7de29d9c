//! `cargo xtask demo` and `cargo xtask bench`: programs of `e2e` that people look at.

use std::fs;

use anyhow::{Context as _, Result, bail};

use crate::{previous, process, setup, workspace};

/// The benchmark that replaces replicas of this version by those of the previous one.
const PLAYS_VERSIONS: &str = "bench_ha";

/// The benchmark that also tells what criterion measures of the core's parts, if all is measured.
const OF_THE_CORE: &str = "bench_agent";
const PARTS: &[&str] = &[
    "bench",
    "--profile",
    PROFILE,
    "--locked",
    "--package",
    "holdfast-agent-core",
    "--bench",
    "core",
];

/// Profile of Cargo.toml that benchmarks are built with, and the name of its directory.
const PROFILE: &str = "measured";

/// Benchmarks that start no other program of the workspace.
const WITHIN_ONE_PROCESS: &[&str] = &["bench_agent", "bench_datapath", "bench_rules"];
/// Programs that the others start.
const PROGRAMS: &[&str] = &[
    "--package",
    "holdfast-agent",
    "--package",
    "holdfast-sdp",
    "--package",
    "holdfast-cni",
    "--bin",
    "holdfast-agent",
    "--bin",
    "holdfast-cni",
    "--bin",
    "holdfast-sdp",
    "--bin",
    "raw_forwarder",
    "--bin",
    "traffic",
];

/// Builds everything and plays the story.
pub(crate) fn demo(keep: bool) -> Result<()> {
    setup::lab()?;
    build_all()?;
    let program = workspace::target_dir()?.join("debug/demo");
    let mut demo = process::command(&program.to_string_lossy(), &[]);
    if keep {
        demo.arg("--keep");
    }
    process::run(demo).context("the demo says above which step does not hold")
}

/// Builds what the benchmark `name` runs, with optimisation, and runs it.
pub(crate) fn bench(name: &str, args: &[String]) -> Result<()> {
    let bin = format!("bench_{}", name.replace('-', "_"));
    let known = benchmarks()?;
    if !known.contains(&bin) {
        let names: Vec<&str> = known
            .iter()
            .filter_map(|bin| bin.strip_prefix("bench_"))
            .collect();
        bail!(
            "there is no benchmark `{name}`; there are: {}",
            names.join(", ")
        );
    }
    setup::lab()?;
    setup::bench()?;
    let mut args = args.to_vec();
    if bin == PLAYS_VERSIONS && !args.iter().any(|arg| arg.starts_with("--previous=")) {
        let reference = take_value(&mut args, "--previous-ref");
        let previous = previous::build(reference.as_deref(), previous::Profile::Release)?;
        args.push(format!("--previous={}", previous.sdp.display()));
    }
    build_bench(&bin)?;
    if bin == OF_THE_CORE && args.is_empty() {
        let criterion = workspace::target_dir()?.join("criterion");
        if criterion.exists() {
            // Figures of an earlier run, which may have other benchmarks.
            fs::remove_dir_all(&criterion)?;
        }
        process::run(process::command("cargo", PARTS))?;
        args.push(format!("--criterion={}", criterion.display()));
    }
    let program = workspace::target_dir()?.join(PROFILE).join(&bin);
    let mut bench = process::command(&program.to_string_lossy(), &[]);
    bench.args(args);
    process::run(bench)
}

/// Takes `flag=value` out of `args`.
fn take_value(args: &mut Vec<String>, flag: &str) -> Option<String> {
    let value = |arg: &String| Some(arg.strip_prefix(flag)?.strip_prefix('=')?.to_owned());
    let found = args.iter().find_map(value);
    args.retain(|arg| value(arg).is_none());
    found
}

fn build_all() -> Result<()> {
    let mut build = process::command("cargo", &["build", "--locked", "--workspace"]);
    build.args(["--exclude", workspace::BPF, "--bins"]);
    process::run(build)
}

fn build_bench(bin: &str) -> Result<()> {
    let mut build = process::command("cargo", &["build", "--locked", "--profile", PROFILE]);
    build.args(["--package", workspace::E2E, "--bin", bin]);
    if !WITHIN_ONE_PROCESS.contains(&bin) {
        build.args(PROGRAMS);
    }
    process::run(build)
}

fn benchmarks() -> Result<Vec<String>> {
    let metadata = workspace::metadata(false)?;
    Ok(workspace::targets(&metadata, workspace::E2E, "bin")
        .filter(|name| name.starts_with("bench_"))
        .map(str::to_owned)
        .collect())
}
