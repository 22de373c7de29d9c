//! What one change of the cluster costs.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::objects;
use super::watched::{Agent, Cluster};

/// Number of changes that come one after another, each when the previous change is in force.
const ALONE: usize = 100;
/// Number of changes that come at a fixed rate.
const PACED: usize = 2_000;
/// Rate of the paced changes, per second.
const RATE: u32 = 500;
/// Versions that a pod alternates between.
const TRACKS: [&str; 2] = ["canary", "stable"];

/// Cost of changes of one kind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cost {
    /// Median and 99th percentile of the time until a change is in the kernel's map, if it is
    /// visible there.
    pub(crate) latency: Option<(Duration, Duration)>,
    /// CPU time of the agent for each change.
    pub(crate) cpu: Duration,
}

/// A pod gets another label.
pub(crate) fn of_pods(cluster: &Cluster, agent: &Agent) -> Result<Cost> {
    let mut times = Vec::new();
    let pods = cluster.size.pods;
    // The pods are far from each other. Each changes twice, between its versions.
    for n in 0..ALONE {
        let number = n / 2 * 7 % pods;
        let address = objects::address(number);
        let before = agent.identity(address)?;
        let track = TRACKS.get(n % 2).context("track")?;
        cluster.api.put(objects::pod(number, track))?;
        times.push(agent.wait_for(address, |now| now.is_some() && now != before)?);
    }
    times.sort_unstable();
    let at = |percent: usize| times.get((times.len() - 1) * percent / 100).copied();
    let latency = at(50).zip(at(99));
    let cpu = paced(cluster, agent, |n| {
        let track = TRACKS.get(n / pods % 2).context("track")?;
        cluster.api.put(objects::pod(n % pods, track)).map(|_| ())
    })?;
    Ok(Cost { latency, cpu })
}

/// Backends of a Service are replaced.
pub(crate) fn of_slices(cluster: &Cluster, agent: &Agent) -> Result<Cost> {
    let services = cluster.size.services;
    let cpu = paced(cluster, agent, |n| {
        let slice = objects::slice(n % services, cluster.size.pods, 1 + n / services % 2);
        cluster.api.put(slice).map(|_| ())
    })?;
    Ok(Cost { latency: None, cpu })
}

/// A node gets another address.
pub(crate) fn of_nodes(cluster: &Cluster, agent: &Agent) -> Result<Cost> {
    let nodes = cluster.size.nodes;
    let cpu = paced(cluster, agent, |n| {
        let more = objects::node_address(100_000 + n);
        let node = objects::node(n % nodes, Some(more));
        cluster.api.put(node).map(|_| ())
    })?;
    Ok(Cost { latency: None, cpu })
}

/// CPU time of the agent for each of the changes.
fn paced(
    cluster: &Cluster,
    agent: &Agent,
    mut change: impl FnMut(usize) -> Result<()>,
) -> Result<Duration> {
    agent.settle()?;
    let before = agent.cpu()?;
    let start = Instant::now();
    for n in 0..PACED {
        let due = start + Duration::from_secs(1) / RATE * u32::try_from(n)?;
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        change(n)?;
    }
    // A last change, which is in force after all others of its kind.
    cluster.api.put(objects::pod(0, "last"))?;
    agent.settle()?;
    Ok((agent.cpu()? - before) / u32::try_from(PACED)?)
}
