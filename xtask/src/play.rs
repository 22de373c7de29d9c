//! `cargo xtask demo` and `cargo xtask bench`: programs of `e2e` that people look at.

use anyhow::{Context as _, Result, bail};

use crate::{process, setup, workspace};

/// Builds everything and plays the story.
pub(crate) fn demo(keep: bool) -> Result<()> {
    setup::lab()?;
    build_programs(&[])?;
    let program = workspace::target_dir()?.join("debug/demo");
    let mut demo = process::command(&program.to_string_lossy(), &[]);
    if keep {
        demo.arg("--keep");
    }
    process::run(demo).context("the demo says above which step does not hold")
}

/// Builds everything for release and runs the benchmark `name`.
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
    build_programs(&["--release"])?;
    let program = workspace::target_dir()?.join("release").join(&bin);
    let mut bench = process::command(&program.to_string_lossy(), &[]);
    bench.args(args);
    process::run(bench)
}

fn build_programs(profile: &[&str]) -> Result<()> {
    let mut build = process::command("cargo", &["build", "--locked", "--workspace"]);
    build
        .args(["--exclude", workspace::BPF, "--bins"])
        .args(profile);
    process::run(build)
}

fn benchmarks() -> Result<Vec<String>> {
    let metadata = workspace::metadata(false)?;
    Ok(workspace::targets(&metadata, workspace::E2E, "bin")
        .filter(|name| name.starts_with("bench_"))
        .map(str::to_owned)
        .collect())
}
