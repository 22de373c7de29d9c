//! `cargo xtask bench cluster`: an agent that watches a large cluster. Fails if a promise is broken.
//!
//! The agent is the program itself. The API server is the server of the tests, with objects as
//! large as in a real cluster.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Args;
use holdfast_e2e::bench::usage;

mod changes;
mod identities;
pub(crate) mod objects;
pub(crate) mod report;
mod soak;
mod watched;

use objects::Size;
use report::Report;
use watched::Cluster;

/// First synchronisation, memory, and the cost of changes.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Only parts whose name contains this: sync, growth, identities; soak runs only by name
    filter: Option<String>,
    /// A tenth of the cluster
    #[arg(long)]
    short: bool,
    /// How long the soak runs at most, seconds
    #[arg(long, default_value_t = 240)]
    soak_seconds: u64,
    /// Where the figures go
    #[arg(long, default_value = "target/bench/cluster.json")]
    json: PathBuf,
}

/// Promised memory in addition to an agent of an empty cluster, MiB, and promised time until an
/// agent is ready.
const MEMORY_MIB: f64 = 64.0;
const SYNC: Duration = Duration::from_secs(10);
/// A change in the large cluster costs at most this many times as much as in the small one.
const FLAT: f64 = 2.0;

fn size(tenths: usize) -> Size {
    Size {
        pods: 1_000 * tenths,
        nodes: 500 * tenths,
        services: 500 * tenths,
    }
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let wanted = |part: &str| options.filter.as_ref().is_none_or(|f| part.contains(f));
    let tenths = if options.short { 1 } else { 10 };
    let mut report = Report::default();
    if wanted("sync") {
        sync(&mut report, size(tenths))?;
    }
    if wanted("growth") {
        growth(&mut report, size(tenths))?;
    }
    if wanted("identities") {
        identities::measure(&mut report, 1_000 * tenths)?;
    }
    if options.filter.as_deref() == Some("soak") {
        let limit = Duration::from_secs(options.soak_seconds);
        soak::play(&mut report, size(tenths), limit)?;
    }
    report.write(&options.json)?;
    println!("written to {}", options.json.display());
    let broken = report.broken();
    ensure!(broken.is_empty(), "broken: {}", broken.join(", "));
    Ok(())
}

/// Time and memory of an agent that starts.
fn sync(report: &mut Report, size: Size) -> Result<()> {
    let empty = Cluster::start()?;
    let agent = empty.start_agent()?;
    agent.settle()?;
    let (without, _) = agent.memory()?;
    report.add("sync-empty", "s", agent.sync.as_secs_f64());
    report.add("memory-empty", "MiB", without);
    drop((agent, empty));

    let mut full = Cluster::start()?;
    full.grow(size)?;
    let server = usage::cpu_time(std::process::id())?;
    let agent = full.start_agent()?;
    let server = usage::cpu_time(std::process::id())? - server;
    let seconds = agent.sync.as_secs_f64();
    report.promise("sync", "s", seconds, "< 10 s", agent.sync < SYNC);
    report.add("sync-cpu", "s", agent.cpu()?.as_secs_f64());
    report.add("sync-cpu-of-the-server", "s", server.as_secs_f64());
    agent.settle()?;
    let (with, most) = agent.memory()?;
    let more = with - without;
    report.promise("memory", "MiB more", more, "<= 64 MiB", more <= MEMORY_MIB);
    report.add("memory-most", "MiB more", most - without);
    report.add("prefixes", "entries", count(agent.prefixes()?));
    Ok(())
}

/// Cost of a change in a cluster that grows.
fn growth(report: &mut Report, last: Size) -> Result<()> {
    let part = |of: usize| Size {
        pods: last.pods / of,
        nodes: last.nodes / of,
        services: last.services / of,
    };
    let mut cluster = Cluster::start()?;
    cluster.grow(part(100))?;
    let agent = cluster.start_agent()?;
    let mut first: Option<Vec<f64>> = None;
    for of in [100, 10, 1] {
        cluster.grow(part(of))?;
        let newest = objects::address(cluster.size.pods - 1);
        agent.wait_for(newest, |identity| identity.is_some())?;
        agent.settle()?;
        let pods = cluster.size.pods;
        let kinds = [
            ("pod", changes::of_pods(&cluster, &agent)?),
            ("slice", changes::of_slices(&cluster, &agent)?),
            ("node", changes::of_nodes(&cluster, &agent)?),
        ];
        let mut costs = Vec::new();
        for (kind, cost) in kinds {
            let micros = cost.cpu.as_secs_f64() * 1e6;
            costs.push(micros);
            let name = format!("change-{kind}-of-{pods}");
            let ratio = first.as_ref().and_then(|first| first.get(costs.len() - 1));
            match ratio.map(|first| micros / first) {
                Some(ratio) if of == 1 => {
                    let promise = format!("{ratio:.2} of the smallest, <= {FLAT}");
                    report.promise(&name, "us CPU", micros, &promise, ratio <= FLAT);
                }
                _ => report.add(&name, "us CPU", micros),
            }
            if let Some((median, slow)) = cost.latency {
                report.add(&format!("{name}-p50"), "ms", median.as_secs_f64() * 1e3);
                report.add(&format!("{name}-p99"), "ms", slow.as_secs_f64() * 1e3);
            }
        }
        first.get_or_insert(costs);
    }
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
fn count(number: usize) -> f64 {
    number as f64
}
