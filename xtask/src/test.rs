//! `cargo xtask test`: the tiers, and one line that sums them up.

mod guests;
mod packages;
mod programs;
mod tally;
mod tier;

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader},
    process::{Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, bail};
use parking_lot::Mutex;

pub(crate) use tier::Tier;

use crate::{fuzz, image, kernels::Kernel, previous, process, setup};
use programs::test_programs;
use tally::Tally;

/// A file of tests that runs longer than this hangs: it is ended and counts as failed.
const E2E_LIMIT: Duration = Duration::from_secs(10 * 60);
/// The same limit for the nightly tests.
const NIGHTLY_LIMIT: Duration = Duration::from_secs(2 * 60 * 60);

/// How long each fuzzer runs.
const FUZZ_FOR: Duration = Duration::from_secs(60);
/// Beginning of the names of the tests that form the tier `hostile`.
const HOSTILE: &str = "hostile::";
/// Where the tests of `e2e` find the previous version's programs.
const PREVIOUS_SDP: &str = "HOLDFAST_PREVIOUS_SDP";
const PREVIOUS_AGENT: &str = "HOLDFAST_PREVIOUS_AGENT";

/// What `cargo xtask test` runs, step by step: the lists of a step at the same time, and the tiers of a list one
/// after another. Tests of the last step wait for other programs most of the time.
const ALL: &[&[&[Tier]]] = &[
    &[&[Tier::Unit]],
    &[&[Tier::Kernel]],
    &[&[Tier::Netns]],
    &[&[Tier::Image, Tier::Packages], &[Tier::Cri, Tier::Guest]],
];

/// Runs `tier`, or unit, kernel, netns, image, packages, cri and guest, and prints the sum.
pub(crate) fn run(tier: Option<Tier>, filter: Option<&str>, kernel: Option<Kernel>) -> Result<()> {
    if kernel.is_some() && tier != Some(Tier::Kernels) {
        bail!("--kernel needs --tier kernels: the other tiers run on this machine's kernel");
    }
    let alone = tier.map(|tier| [tier]);
    let steps: Vec<Vec<&[Tier]>> = match &alone {
        Some(tier) => vec![vec![tier]],
        None => ALL.iter().map(|step| step.to_vec()).collect(),
    };
    if tier != Some(Tier::Unit) {
        process::require_root("every tier but `unit`")?;
        setup::lab()?;
    }
    let mut total = Tally::default();
    let mut lines = Vec::new();
    for step in steps {
        let in_turn = |tiers: &&[Tier]| -> Result<Vec<_>> {
            let timed = tiers.iter().map(|tier| {
                let start = Instant::now();
                let tally = one(*tier, filter, kernel)?;
                Ok((*tier, tally, start.elapsed().as_secs()))
            });
            timed.collect()
        };
        for (tier, tally, seconds) in at_once(&step, in_turn)?.iter().flatten() {
            lines.push(format!("{tier:<7?} {tally} in {seconds} s"));
            total.add(tally);
        }
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

fn one(tier: Tier, filter: Option<&str>, kernel: Option<Kernel>) -> Result<Tally> {
    match tier {
        Tier::Unit => unit(filter),
        Tier::Kernel | Tier::Netns | Tier::Hostile => e2e(tier, filter),
        Tier::Image => images(),
        Tier::Packages => {
            heading("packages");
            packages::run()
        }
        Tier::Cri => {
            setup::cri()?;
            e2e(tier, filter)
        }
        Tier::Guest => {
            heading("guest");
            guests::smoke()
        }
        Tier::Kernels => {
            heading("kernels");
            guests::run(filter, kernel)
        }
        Tier::Nightly => {
            setup::nightly()?;
            let mut tally = fuzzers()?;
            tally.add(&e2e(tier, filter)?);
            Ok(tally)
        }
    }
}

/// Results of `work` for each item, all at the same time.
fn at_once<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> Result<R> + Sync) -> Result<Vec<R>> {
    thread::scope(|scope| {
        let work = &work;
        let begun: Vec<_> = items
            .iter()
            .map(|item| scope.spawn(move || work(item)))
            .collect();
        let ended = begun.into_iter().map(|thread| {
            let ended = thread.join();
            ended.map_err(|_| anyhow!("a thread panicked"))?
        });
        ended.collect()
    })
}

/// Tests of the default members.
fn unit(filter: Option<&str>) -> Result<Tally> {
    heading("unit");
    let mut command = process::command("cargo", &["test", "--locked", "--no-fail-fast"]);
    command.args(filter);
    observe("cargo test", command, Output::AtOnce, None)
}

/// Runs every fuzzer for [`FUZZ_FOR`]. A fuzzer that finds something counts as a failure.
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

/// Makes and checks the images, with the programs that earlier tiers have built.
fn images() -> Result<Tally> {
    heading("image");
    let mut tally = Tally::default();
    match image::run(image::Profile::Debug) {
        Ok(passed) => tally.passed = u64::try_from(passed.len())?,
        Err(error) => tally.fail(format!("image: {error:#}")),
    }
    Ok(tally)
}

/// Runs the tests of `e2e` that belong to the tier.
fn e2e(tier: Tier, filter: Option<&str>) -> Result<Tally> {
    heading(match tier {
        Tier::Kernel => "kernel",
        Tier::Nightly => "nightly",
        Tier::Hostile => "hostile",
        Tier::Cri => "cri",
        Tier::Unit | Tier::Netns | Tier::Image | Tier::Packages | Tier::Guest | Tier::Kernels => {
            "netns"
        }
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
    let ignored = matches!(tier, Tier::Nightly | Tier::Hostile);
    let mut jobs = Vec::new();
    for program in programs.iter().filter(|program| program.is_of(tier)) {
        let mut tests = program.tests(ignored)?;
        tests.retain(|test| filter.is_none_or(|filter| test.contains(filter)));
        tests.retain(|test| tier != Tier::Hostile || test.starts_with(HOSTILE));
        for (name, tests) in program.jobs(tests) {
            let mut command = program.command(&tests);
            if ignored {
                command.arg("--ignored");
            }
            if let Some(previous) = &previous {
                command.env(PREVIOUS_SDP, &previous.sdp);
                command.env(PREVIOUS_AGENT, &previous.agent);
            }
            jobs.push(Job {
                name,
                command,
                lanes: if ignored { 1 } else { program.lanes() },
            });
        }
    }
    total.add(&side_by_side(jobs, limit)?);
    Ok(total)
}

/// Tests that run in one process.
#[derive(Debug)]
struct Job {
    name: String,
    command: Command,
    /// How many such jobs may run at the same time.
    lanes: usize,
}

/// Runs the jobs, beginning with the jobs of which the most may run at the same time. Each job
/// makes its own namespaces and pins, so jobs do not affect each other.
fn side_by_side(jobs: Vec<Job>, limit: Duration) -> Result<Tally> {
    let mut groups = BTreeMap::<usize, Vec<Job>>::new();
    for job in jobs {
        groups.entry(job.lanes).or_default().push(job);
    }
    let mut total = Tally::default();
    for (lanes, jobs) in groups.into_iter().rev() {
        total.add(&in_lanes(lanes, jobs, limit)?);
    }
    Ok(total)
}

fn in_lanes(lanes: usize, jobs: Vec<Job>, limit: Duration) -> Result<Tally> {
    let output = if lanes == 1 {
        Output::AtOnce
    } else {
        Output::AtItsEnd
    };
    let queue = Mutex::new(jobs.into_iter());
    let lane = || -> Result<Tally> {
        let mut tally = Tally::default();
        loop {
            let next = queue.lock().next();
            let Some(job) = next else { return Ok(tally) };
            tally.add(&observe(&job.name, job.command, output, Some(limit))?);
        }
    };
    let mut total = Tally::default();
    let lanes: Vec<usize> = (0..lanes).collect();
    for tally in at_once(&lanes, |_| lane())? {
        total.add(&tally);
    }
    Ok(total)
}

fn heading(tier: &str) {
    println!("\n== {tier} ==");
}

/// When the output of a test program is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Output {
    /// Each line as soon as it arrives.
    AtOnce,
    /// In one piece, so that the output of two programs is not mixed.
    AtItsEnd,
}

/// Runs a test program, passes its output on and counts its results.
///
/// A program that dies without a result, or exceeds `limit`, counts as one failure.
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
    // Processes that a hung program left behind may hold the pipe open, so the output is not
    // awaited.
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
