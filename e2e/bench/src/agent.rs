//! `cargo xtask bench agent`: cost of the agent's core at scale. Fails if a promise is broken.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use clap::Args;

mod calibration;
mod cluster;
mod firewall_names;
mod firewalls;
mod growth;
mod latency;
mod names;
mod parts;
mod prefixes;
mod report;
mod selectors;

use report::{Figure, Report};

/// Names, prefixes, selectors and rules at scale.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Only workloads whose name contains this
    filter: Option<String>,
    /// A tenth of each
    #[arg(long)]
    short: bool,
    /// Run this one workload and print its figures as JSON
    #[arg(long, hide = true)]
    part: Option<String>,
    /// Criterion's directory, for the figures of `cargo bench -p holdfast-agent-core`
    #[arg(long)]
    criterion: Option<PathBuf>,
    /// Where the figures go
    #[arg(long, default_value = "target/bench/agent.json")]
    json: PathBuf,
}

/// A workload: its name, and the function that measures it at a size of 1 or 10 (full) tenths.
type Workload = (&'static str, fn(usize) -> Result<Vec<Figure>>);

const WORKLOADS: [Workload; 14] = [
    ("names-update", |tenths| names::update_rounds(100 * tenths)),
    ("names-expire", |tenths| {
        names::update_and_expire(100 * tenths)
    }),
    ("names-churn", |tenths| names::churn(3_000 * tenths)),
    ("prefixes-table", |tenths| prefixes::table(100_000 * tenths)),
    ("prefixes-learned", |tenths| {
        prefixes::learned(100_000 * tenths)
    }),
    ("selectors", |tenths| selectors::cache(1_000 * tenths)),
    ("rules", |tenths| {
        selectors::regeneration(25 * tenths, 100 * tenths)
    }),
    ("firewalls", |tenths| {
        firewalls::changes(10 * tenths, 100 * tenths)
    }),
    ("firewalls-cold-start", |tenths| {
        firewalls::cold_start(tenths, 200 * tenths)
    }),
    ("firewall-names", |tenths| {
        firewall_names::unmatched(5_000 * tenths)
    }),
    ("cluster-pods", |tenths| cluster::pods(100 * tenths)),
    ("cluster-services", |tenths| {
        cluster::services(500 * tenths, 25 * tenths)
    }),
    ("growth", |tenths| growth::clusters(100_000 * tenths)),
    ("kernel", |tenths| {
        latency::realised(25 * tenths, 100 * tenths, 200 * tenths)
    }),
];

pub(crate) fn run(options: &Options) -> Result<()> {
    if let Some(part) = &options.part {
        return run_part(part, options);
    }
    let mut report = Report::default();
    for (name, _) in WORKLOADS {
        let wanted = options.filter.as_ref();
        if wanted.is_none_or(|filter| name.contains(filter.as_str())) {
            // In its own process, so that memory that an earlier workload released is not measured.
            report.add(in_process(name, options.short)?);
        }
    }
    if let Some(criterion) = &options.criterion {
        report.add(parts::figures(criterion)?);
    }
    report.write(&options.json)?;
    println!("written to {}", options.json.display());
    let broken = report.broken();
    ensure!(broken.is_empty(), "broken: {}", broken.join(", "));
    Ok(())
}

fn in_process(name: &str, short: bool) -> Result<Vec<Figure>> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["agent", "--part", name]);
    if short {
        command.arg("--short");
    }
    let output = command.stderr(Stdio::inherit()).output()?;
    ensure!(output.status.success(), "{name}: {}", output.status);
    serde_json::from_slice(&output.stdout).with_context(|| name.to_owned())
}

fn run_part(part: &str, options: &Options) -> Result<()> {
    let tenths = if options.short { 1 } else { 10 };
    let workload = WORKLOADS.iter().find(|(name, _)| *name == part);
    let (_, run) = workload.with_context(|| format!("there is no workload {part}"))?;
    println!("{}", serde_json::to_string(&run(tenths)?)?);
    Ok(())
}
