//! A day of changes in minutes, with the faults of an API server in between.
//!
//! The time is compressed: changes come as fast as agent and server can follow, up to a limit,
//! instead of 50 a second. Effects of long times (certificates, tokens, timeouts of watches) are
//! not included.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::objects::{self, Size};
use super::report::Report;
use super::watched::{Agent, Cluster};

/// Number of changes of a day at 50 a second.
const DAY: usize = 50 * 24 * 3600;
/// Maximum number of changes per second.
const RATE: u32 = 2_000;
/// Number of changes between two checks of how far the agent is.
const ROUND: usize = 500;
/// Highest ratio of the agent's memory at the end to its memory after the first tenth.
const GROWTH: f64 = 1.1;
/// Plural names of the kinds whose watches are broken off.
const KINDS: [&str; 4] = ["pods", "endpointslices", "ciliumnodes", "services"];

/// Memory and table sizes of the agent at one moment.
#[derive(Clone, Copy, Debug)]
struct Reading {
    memory: f64,
    prefixes: usize,
    identities: usize,
}

fn read(cluster: &Cluster, agent: &Agent) -> Result<Reading> {
    agent.settle()?;
    Ok(Reading {
        memory: agent.memory()?.0,
        prefixes: agent.prefixes()?,
        identities: cluster.lab.identities()?.len(),
    })
}

/// Plays until `limit`, or until a day's changes were made.
pub(crate) fn play(report: &mut Report, size: Size, limit: Duration) -> Result<()> {
    let mut cluster = Cluster::start()?;
    cluster.grow(size)?;
    let agent = cluster.start_agent()?;
    let start = Instant::now();
    let (mut changes, mut faults) = (0, 0);
    let mut first: Option<Reading> = None;
    while changes < DAY && start.elapsed() < limit {
        let round = Instant::now();
        for _ in 0..ROUND {
            change(&cluster, changes)?;
            changes += 1;
        }
        // The last change of a round is of a pod.
        let marked = objects::address(changes % size.pods);
        let before = agent.identity(marked)?;
        // This label differs from the last mark of the same pod, `size.pods` changes ago.
        let track = format!("mark-{}", changes / size.pods % 2);
        cluster.api.put(objects::pod(changes % size.pods, &track))?;
        agent.wait_for(marked, |now| now.is_some() && now != before)?;
        if changes % (20 * ROUND) == 0 {
            fault(&cluster, faults)?;
            faults += 1;
        }
        let pace = Duration::from_secs(1) / RATE * u32::try_from(ROUND)?;
        std::thread::sleep(pace.saturating_sub(round.elapsed()));
        // By then, each node has its second address.
        let has_all_entries = changes >= 10 * size.nodes;
        if first.is_none() && has_all_entries && start.elapsed() >= limit / 10 {
            first = Some(read(&cluster, &agent)?);
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    let first = first.unwrap_or(read(&cluster, &agent)?);
    let last = read(&cluster, &agent)?;
    report.add("soak-changes", "changes", super::count(changes));
    report.add("soak-faults", "faults", super::count(faults));
    report.add("soak-time", "s", seconds);
    report.add("soak-memory-first", "MiB", first.memory);
    let ratio = last.memory / first.memory;
    let promise = format!("{ratio:.3} of that after a tenth, <= {GROWTH}");
    report.promise("soak-memory", "MiB", last.memory, &promise, ratio <= GROWTH);
    for (name, first, last) in [
        ("soak-prefixes", first.prefixes, last.prefixes),
        ("soak-identities", first.identities, last.identities),
    ] {
        let holds = last * 100 <= first * 105;
        let promise = format!("after a tenth {first}, at most 5 % more");
        report.promise(name, "entries", super::count(last), &promise, holds);
    }
    ensure!(agent.runs()?, "the agent has ended");
    Ok(())
}

/// Six of ten changes are of pods, three are of slices, and one is of a node. Two of the six replace a pod.
fn change(cluster: &Cluster, number: usize) -> Result<()> {
    let Size {
        pods,
        nodes,
        services,
    } = cluster.size;
    let api = &cluster.api;
    let (round, turn) = (number / 10, number % 10);
    // This step visits all objects of a kind.
    let of = |all: usize| round * 7919 % all;
    match turn {
        0..=3 => {
            let track = if round / pods % 2 == 0 {
                "canary"
            } else {
                "stable"
            };
            api.put(objects::pod((of(pods) + turn) % pods, track))?;
        }
        4 => {
            let pod = of(pods);
            api.delete("pods", &objects::namespace_of(pod), &objects::pod_name(pod))?;
            api.put(objects::pod(pod, "stable"))?;
        }
        5..=7 => {
            let service = (of(services) + turn) % services;
            api.put(objects::slice(service, pods, round % 5))?;
        }
        8 => {
            let service = of(services);
            let name = format!("svc-{service}");
            api.delete("services", &objects::namespace_of(service * 10), &name)?;
            api.put(objects::service(service))?;
        }
        _ => {
            let more = objects::node_address(100_000 + round % nodes);
            api.put(objects::node(of(nodes), Some(more)))?;
        }
    }
    Ok(())
}

/// One of the faults: broken streams, a revision that is too old, a server that refuses, a server
/// that is away.
fn fault(cluster: &Cluster, number: usize) -> Result<()> {
    let api = &cluster.api;
    let kind = KINDS
        .get(number / 4 % KINDS.len())
        .copied()
        .unwrap_or("pods");
    match number % 4 {
        0 => api.break_streams(kind),
        1 => api.expire(kind),
        2 => {
            api.refuse(kind, holdfast_e2e::apiserver::Refusal::TooMany(2))?;
            api.break_streams(kind)
        }
        _ => {
            api.away();
            std::thread::sleep(Duration::from_millis(500));
            api.back()
        }
    }
}
