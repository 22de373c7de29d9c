//! `cargo xtask demo` and `cargo xtask bench`: programs of `e2e` that people look at.

use std::fs;

use anyhow::{Context as _, Result};
use clap::ValueEnum;

use crate::{previous, process, setup, workspace};

/// A benchmark: a subcommand of the program `bench`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Benchmark {
    /// The agent's core: names, prefixes, selectors, firewalls, and the latency of a mapping
    Agent,
    /// Endpoints that begin and end, also by the CNI plugin
    Attach,
    /// A cluster's changes under one agent
    Cluster,
    /// The eBPF programs, and how they are attached
    Datapath,
    /// Queries a second and their latency, beside forwarders and no proxy
    Dns,
    /// What a client loses while programs are replaced
    Ha,
    /// What a pod loses while another attacks
    Hostile,
    /// NetworkPolicies by nftables, while node, policies and cluster grow
    Netpol,
    /// A relay with many agents
    Relay,
    /// How long an answer waits for the datapath
    Release,
    /// Rules of many endpoints replaced in the proxy
    Rules,
}

impl Benchmark {
    /// Whether the benchmark starts no other program.
    fn is_one_process(self) -> bool {
        matches!(self, Self::Agent | Self::Datapath | Self::Rules)
    }
}

/// Arguments of cargo for the criterion benchmarks of the core's parts. They run with
/// [`Benchmark::Agent`] if everything is measured.
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

/// The benchmarks' package, and its program.
const PACKAGE: &str = "holdfast-bench";
const BENCH: &str = "bench";

/// Programs that the other benchmarks start.
const PROGRAMS: &[&str] = &[
    "--package",
    "holdfast-agent",
    "--package",
    "holdfast-sdp",
    "--package",
    "holdfast-cni",
    "--package",
    workspace::E2E,
    "--bin",
    "holdfast-agent",
    "--bin",
    "holdfast-cni",
    "--bin",
    "holdfast-sdp",
    "--bin",
    "lab",
];

/// Builds everything and plays the story.
pub(crate) fn demo(keep: bool) -> Result<()> {
    setup::lab()?;
    build_all()?;
    let program = workspace::target_dir()?.join("debug/lab");
    let mut demo = process::command(&program.to_string_lossy(), &["demo"]);
    if keep {
        demo.arg("--keep");
    }
    process::run(demo).context("the demo says above which step does not hold")
}

/// Builds what the benchmark runs, with optimisation, and runs it.
pub(crate) fn bench(benchmark: Benchmark, args: &[String]) -> Result<()> {
    setup::lab()?;
    setup::bench()?;
    let mut args = args.to_vec();
    if benchmark == Benchmark::Ha && !args.iter().any(|arg| arg.starts_with("--previous=")) {
        let reference = take_value(&mut args, "--previous-ref");
        let previous = previous::build(reference.as_deref(), previous::Profile::Release)?;
        args.push(format!("--previous={}", previous.sdp.display()));
    }
    build_bench(benchmark)?;
    if benchmark == Benchmark::Agent && args.is_empty() {
        let criterion = workspace::target_dir()?.join("criterion");
        if criterion.exists() {
            // The directory has figures of an earlier run, which may be of other benchmarks.
            fs::remove_dir_all(&criterion)?;
        }
        process::run(process::command("cargo", PARTS))?;
        args.push(format!("--criterion={}", criterion.display()));
    }
    let program = workspace::target_dir()?.join(PROFILE).join(BENCH);
    let mut bench = process::command(&program.to_string_lossy(), &[]);
    let name = benchmark.to_possible_value();
    bench.arg(name.context("a benchmark has a name")?.get_name());
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

fn build_bench(benchmark: Benchmark) -> Result<()> {
    let mut build = process::command("cargo", &["build", "--locked", "--profile", PROFILE]);
    build.args(["--package", PACKAGE, "--bin", BENCH]);
    if !benchmark.is_one_process() {
        build.args(PROGRAMS);
    }
    process::run(build)
}
