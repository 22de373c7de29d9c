//! `cargo xtask test`: the tiers, one after another, and one line that sums them up.

mod guests;
mod tally;

use std::{
    io::{BufRead as _, BufReader},
    path::PathBuf,
    process::{Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, bail};
use clap::ValueEnum;
use parking_lot::Mutex;
use serde_json::Value;

use crate::{fuzz, image, kernels::Kernel, previous, process, repository, setup, workspace};
use tally::Tally;

/// A test program that runs longer hangs: it is ended and counts as failed.
const E2E_LIMIT: Duration = Duration::from_secs(10 * 60);
/// The same for the long runs.
const NIGHTLY_LIMIT: Duration = Duration::from_secs(2 * 60 * 60);

/// How long each fuzzer runs.
const FUZZ_FOR: Duration = Duration::from_secs(60);
/// Test programs that run at the same time. Most of their time they wait.
const LANES: usize = 2;
/// Programs of the kernel and netns tiers that keep both CPUs busy or count lost queries.
const ALONE: [&str; 5] = [
    "under_cilium_restart",
    "dns_quota",
    "ha_promises",
    HOSTILE,
    "restart_storm",
];

/// The test program of the tier of the same name.
const HOSTILE: &str = "hostile";
/// Where the tests of `e2e` find the previous version's programs.
const PREVIOUS_SDP: &str = "HOLDFAST_PREVIOUS_SDP";
const PREVIOUS_AGENT: &str = "HOLDFAST_PREVIOUS_AGENT";

/// What a test needs, and how long it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Tier {
    /// No privilege, seconds
    Unit,
    /// Root: packets through the loaded eBPF programs, seconds
    Kernel,
    /// Root: whole nodes in network namespaces, minutes
    Netns,
    /// Root: the container images of debug builds, made and run, seconds
    Image,
    /// Root: pods that Debian's containerd starts through the CNI plugin, minutes
    Cri,
    /// Root: both programs on Debian 12's kernel, in qemu, a minute or two
    Guest,
    /// Root: every attack of one pod on another at full strength, minutes
    Hostile,
    /// Root: parts of the kernel and netns tiers on older and newer kernels in qemu, an hour for each
    Kernels,
    /// Root: every fuzzer for a minute, and what is marked `#[ignore]`, hours
    Nightly,
}

/// Runs `tier`, or unit, kernel, netns, image, cri and guest, and prints the sum.
pub(crate) fn run(tier: Option<Tier>, filter: Option<&str>, kernel: Option<Kernel>) -> Result<()> {
    if kernel.is_some() && tier != Some(Tier::Kernels) {
        bail!("--kernel needs --tier kernels: the other tiers run on this machine's kernel");
    }
    let tiers = match tier {
        Some(tier) => vec![tier],
        None => vec![
            Tier::Unit,
            Tier::Kernel,
            Tier::Netns,
            Tier::Image,
            Tier::Cri,
            Tier::Guest,
        ],
    };
    if tiers.iter().any(|tier| *tier != Tier::Unit) {
        process::require_root("every tier but `unit`")?;
        setup::lab()?;
    }
    let mut total = Tally::default();
    let mut lines = Vec::new();
    for tier in tiers {
        let start = Instant::now();
        let tally = match tier {
            Tier::Unit => unit(filter)?,
            Tier::Kernel | Tier::Netns | Tier::Hostile => e2e(tier, filter)?,
            Tier::Image => images()?,
            Tier::Cri => {
                setup::cri()?;
                e2e(tier, filter)?
            }
            Tier::Guest => {
                heading("guest");
                guests::smoke()?
            }
            Tier::Kernels => {
                heading("kernels");
                guests::run(filter, kernel)?
            }
            Tier::Nightly => {
                setup::nightly()?;
                let mut tally = fuzzers()?;
                tally.add(&e2e(tier, filter)?);
                tally
            }
        };
        lines.push(format!(
            "{tier:<7?} {tally} in {} s",
            start.elapsed().as_secs()
        ));
        total.add(&tally);
    }
    println!("\ntier");
    for line in lines {
        println!("{line}");
    }
    for name in &total.failures {
        println!("failed: {name}");
    }
    println!("\n{} passed, {} failed", total.passed, total.failed);
    if total.failed > 0 {
        bail!("{} tests failed", total.failed);
    }
    if total.passed == 0 {
        bail!(
            "no test ran{}",
            filter
                .map(|f| format!(": none contains `{f}`"))
                .unwrap_or_default()
        );
    }
    Ok(())
}

/// Tests of the default members.
fn unit(filter: Option<&str>) -> Result<Tally> {
    heading("unit");
    let mut command = process::command("cargo", &["test", "--locked", "--no-fail-fast"]);
    command.args(filter);
    observe("cargo test", command, Output::AtOnce, None)
}

/// Every fuzzer for [`FUZZ_FOR`]; one that finds something counts as a failure.
fn fuzzers() -> Result<Tally> {
    heading("fuzzers");
    let findings = fuzz::run(None, FUZZ_FOR)?;
    let mut tally = Tally {
        passed: u64::try_from(findings.clean.len())?,
        ..Tally::default()
    };
    for name in findings.failed {
        tally.fail(format!("fuzzer {name}"));
    }
    Ok(tally)
}

/// The images, of the programs that the tiers before have built.
fn images() -> Result<Tally> {
    heading("image");
    let mut tally = Tally::default();
    match image::run(image::Profile::Debug) {
        Ok(passed) => tally.passed = u64::try_from(passed.len())?,
        Err(error) => tally.fail(format!("image: {error:#}")),
    }
    Ok(tally)
}

/// Tests of `e2e`.
fn e2e(tier: Tier, filter: Option<&str>) -> Result<Tally> {
    heading(match tier {
        Tier::Kernel => "kernel",
        Tier::Nightly => "nightly",
        Tier::Hostile => "hostile",
        Tier::Cri => "cri",
        Tier::Unit | Tier::Netns | Tier::Image | Tier::Guest | Tier::Kernels => "netns",
    });
    let programs = test_programs()?;
    let mut total = Tally::default();
    let previous = if tier == Tier::Netns {
        match previous::build(None, previous::Profile::Debug) {
            Ok(previous) => Some(previous),
            Err(error) => {
                total.fail(format!("the previous version does not build: {error:#}"));
                None
            }
        }
    } else {
        None
    };
    let limit = if tier == Tier::Nightly {
        NIGHTLY_LIMIT
    } else {
        E2E_LIMIT
    };
    let jobs = programs.into_iter().filter_map(|program| {
        let of_tier = match tier {
            Tier::Nightly => of_name(&program.name) != Tier::Kernels,
            Tier::Hostile => program.name == HOSTILE,
            _ => of_name(&program.name) == tier,
        };
        if !of_tier {
            return None;
        }
        let mut command = process::command(&program.path.to_string_lossy(), &["--test-threads=1"]);
        command.current_dir(repository::root().join("e2e"));
        if let Some(previous) = &previous {
            command.env(PREVIOUS_SDP, &previous.sdp);
            command.env(PREVIOUS_AGENT, &previous.agent);
        }
        if matches!(tier, Tier::Nightly | Tier::Hostile) {
            command.arg("--ignored");
        }
        command.args(filter);
        Some(Job {
            alone: matches!(tier, Tier::Nightly | Tier::Hostile)
                || ALONE.contains(&program.name.as_str()),
            name: program.name,
            command,
        })
    });
    total.add(&side_by_side(jobs.collect(), limit)?);
    Ok(total)
}

/// The tier of a test program of `e2e`, by its name.
fn of_name(name: &str) -> Tier {
    if name.starts_with("kernel_") {
        Tier::Kernel
    } else if name.starts_with("cri_") {
        Tier::Cri
    } else if name == guests::TWO_BOOTS {
        Tier::Kernels
    } else {
        Tier::Netns
    }
}

/// One run of a test program.
#[derive(Debug)]
struct Job {
    name: String,
    command: Command,
    /// Whether no other test may run at the same time.
    alone: bool,
}

/// Runs the programs, [`LANES`] at a time, then those that must run alone. Each makes namespaces
/// and pins of its own, so they do not meet.
fn side_by_side(jobs: Vec<Job>, limit: Duration) -> Result<Tally> {
    let (alone, shared): (Vec<Job>, Vec<Job>) = jobs.into_iter().partition(|job| job.alone);
    let queue = Mutex::new(shared.into_iter());
    let lane = || -> Result<Tally> {
        let mut tally = Tally::default();
        loop {
            let next = queue.lock().next();
            let Some(job) = next else { return Ok(tally) };
            tally.add(&observe(
                &job.name,
                job.command,
                Output::AtItsEnd,
                Some(limit),
            )?);
        }
    };
    let mut total = thread::scope(|scope| {
        let lanes: Vec<_> = (0..LANES).map(|_| scope.spawn(lane)).collect();
        let mut total = Tally::default();
        for lane in lanes {
            total.add(&lane.join().map_err(|_| anyhow!("a lane panicked"))??);
        }
        Ok::<_, anyhow::Error>(total)
    })?;
    for job in alone {
        total.add(&observe(
            &job.name,
            job.command,
            Output::AtOnce,
            Some(limit),
        )?);
    }
    Ok(total)
}

fn heading(tier: &str) {
    println!("\n== {tier} ==");
}

struct TestProgram {
    name: String,
    path: PathBuf,
}

/// Builds the programs under test and the tests of `e2e`, and asks cargo where these are.
///
/// All in one go and with the features of `cargo test`, so that nothing is built twice.
fn test_programs() -> Result<Vec<TestProgram>> {
    let mut build = process::command(
        "cargo",
        &[
            "build",
            "--locked",
            "--workspace",
            "--exclude",
            workspace::BPF,
        ],
    );
    build.args(["--lib", "--bins", "--tests"]);
    build.arg("--message-format=json-render-diagnostics");
    println!("  $ {}", process::line(&build));
    let output = build
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start cargo")?;
    if !output.status.success() {
        bail!("the programs, or the tests of e2e, do not build");
    }
    let manifest = repository::root().join("e2e/Cargo.toml");
    let manifest = manifest.to_string_lossy().into_owned();
    let mut programs: Vec<TestProgram> = String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|message| {
            message["reason"] == "compiler-artifact"
                && message["profile"]["test"] == true
                && message["manifest_path"] == manifest.as_str()
        })
        .filter_map(|message| {
            Some(TestProgram {
                name: message["target"]["name"].as_str()?.to_owned(),
                path: message["executable"].as_str()?.into(),
            })
        })
        .collect();
    programs.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(programs)
}

/// When the output of a test program is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Output {
    /// Line by line.
    AtOnce,
    /// In one piece, so that the output of two programs is not mixed.
    AtItsEnd,
}

/// Runs a test program, passes its output on and counts its results.
///
/// One that dies without a result, or exceeds `limit`, counts as one failure.
fn observe(
    name: &str,
    mut command: Command,
    output: Output,
    limit: Option<Duration>,
) -> Result<Tally> {
    if output == Output::AtOnce {
        println!("\n{name}");
    }
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start `{}`", process::line(&command)))?;
    let stdout = child.stdout.take().context("the output is piped")?;
    let kept = Arc::new(Mutex::new(Vec::new()));
    let reader_kept = Arc::clone(&kept);
    let reader = thread::spawn(move || {
        let mut tally = Tally::default();
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            tally.read(&line);
            if output == Output::AtOnce {
                println!("{line}");
            } else {
                reader_kept.lock().push(line);
            }
        }
        tally
    });
    let start = Instant::now();
    let mut hung = false;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if !hung && limit.is_some_and(|limit| start.elapsed() > limit) {
            hung = true;
            child.kill()?;
        }
        thread::sleep(Duration::from_millis(50));
    };
    // What the program left behind may hold the pipe open: do not wait for it then.
    let mut tally = if hung {
        Tally::default()
    } else {
        reader.join().unwrap_or_default()
    };
    let seconds = start.elapsed().as_secs();
    if output == Output::AtItsEnd {
        println!("\n{name} ({seconds} s)\n{}", kept.lock().join("\n"));
    }
    if hung {
        tally.fail(format!("{name}: no end after {seconds} s"));
    } else if !status.success() && tally.failed == 0 {
        tally.fail(format!("{name}: {status} without a result"));
    }
    Ok(tally)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Option<Duration>) -> Tally {
        let command = process::command("sh", &["-c", script]);
        observe("it", command, Output::AtOnce, limit).expect("sh starts")
    }

    #[test]
    fn the_name_of_a_test_program_says_its_tier() {
        for (name, tier) in [
            ("kernel_steer", Tier::Kernel),
            ("cri_starts", Tier::Cri),
            ("hostile", Tier::Netns),
            ("holdfast_e2e", Tier::Netns),
        ] {
            assert_eq!(of_name(name), tier, "{name}");
        }
    }

    #[test]
    fn results_are_read_from_a_program() {
        let tally = shell(
            "echo 'test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured'",
            None,
        );
        assert_eq!((tally.passed, tally.failed, tally.ignored), (2, 0, 1));
    }

    #[test]
    fn a_program_that_dies_counts_as_failed() {
        let tally = shell("echo 'running 1 test'; exit 101", None);
        assert_eq!((tally.passed, tally.failed), (0, 1));
        let tally = shell(
            "echo 'test result: FAILED. 1 passed; 1 failed; 0 ignored'; exit 101",
            None,
        );
        assert_eq!((tally.passed, tally.failed), (1, 1));
    }

    #[test]
    fn a_program_that_hangs_is_ended_and_counts_as_failed() {
        let tally = shell("exec sleep 1000", Some(Duration::from_millis(50)));
        assert_eq!((tally.passed, tally.failed), (0, 1));
        assert!(tally.failures[0].contains("no end"), "{:?}", tally.failures);
    }
}
