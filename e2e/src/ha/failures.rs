//! R4: one replica of two dies or hangs, or the only one dies beside the agent's built-in proxy.

use std::time::Duration;

use anyhow::Result;
use nix::sys::signal::Signal;

use super::setup::{Setup, now};
use super::{LOST_AT_ONCE, LOST_IN_FLIGHT, Row};
use crate::config;
use crate::node::AgentOptions;
use crate::process::Program;
use crate::traffic::Report;

/// No query that is sent later than this after a fault may be lost, nanoseconds.
const OVER: u64 = 1_000_000_000;
/// Queries sent up to this time before a fault may be lost with the replica, nanoseconds.
const HAD: u64 = 500_000_000;
/// The kernel closes the sockets of a killed proxy within this time, nanoseconds. It is below the
/// pause that clients would notice, with room for a busy machine.
const CLOSES: u64 = 500_000_000;
/// How long the node is without the proxy: longer than the node takes to notice that no proxy
/// answers.
const AWAY: Duration = Duration::from_millis(1500);

/// A replica is killed, and another one is started.
pub(super) fn killed(setup: &Setup) -> Result<Vec<Row>> {
    let (times, report) = under_load(setup, |victim| {
        victim.kill_9()?;
        std::thread::sleep(AWAY);
        Ok(())
    })?;
    Ok(vec![row(&times, OVER, LOST_AT_ONCE, &report)])
}

/// The only replica is killed, and another one started. The agent has a built-in proxy if the
/// chart's values enable it.
pub(super) fn only_one_killed(setup: &Setup) -> Result<Vec<Row>> {
    let _agent = setup.agent(&AgentOptions {
        builtin: !config::chart_value("disableBuiltinDnsProxy")?,
        ..setup.agent_options()
    })?;
    let mut only = setup.replica(0)?;
    let load = setup.load()?;
    let mut times = Vec::new();
    for round in 0..setup.size.faults {
        load.flows()?;
        times.push(now());
        only.kill_9()?;
        std::thread::sleep(AWAY);
        only = setup.replica(round + 1)?;
    }
    let report = load.finish()?;
    Ok(vec![row(&times, CLOSES, LOST_IN_FLIGHT, &report)])
}

/// A replica is stopped. It is killed after a while, so that it sends no late answers.
pub(super) fn stopped(setup: &Setup) -> Result<Vec<Row>> {
    let (times, report) = under_load(setup, |victim| {
        victim.signal(Signal::SIGSTOP)?;
        // Longer than the time after which its slots are free.
        std::thread::sleep(Duration::from_millis(3000));
        victim.kill_9()
    })?;
    Ok(vec![row(&times, OVER, LOST_AT_ONCE, &report)])
}

fn under_load(setup: &Setup, fault: impl Fn(Program) -> Result<()>) -> Result<(Vec<u64>, Report)> {
    let _agent = setup.agent(&setup.agent_options())?;
    let mut replicas = [setup.replica(0)?, setup.replica(1)?];
    let load = setup.load()?;
    let mut times = Vec::new();
    for round in 0..setup.size.faults {
        load.flows()?;
        let [victim, other] = replicas;
        times.push(now());
        fault(victim)?;
        replicas = [other, setup.replica(round + 2)?];
    }
    Ok((times, load.finish()?))
}

/// Holds if every lost query was sent between shortly before a fault and `over` nanoseconds after it.
fn row(times: &[u64], over: u64, promise: &'static str, report: &Report) -> Row {
    let total = report.total();
    let excused = |sent: &u64| {
        times
            .iter()
            .any(|fault| *sent + HAD >= *fault && *sent <= *fault + over)
    };
    let late = total.lost_at.iter().filter(|sent| !excused(sent)).count();
    let last = total
        .lost_at
        .iter()
        .filter_map(|sent| {
            let faults = times.iter().filter(|fault| *fault <= sent);
            faults.map(|fault| (sent - fault) / 1_000_000).min()
        })
        .filter(|after| *after <= over / 1_000_000)
        .max()
        .unwrap_or(0);
    let note = format!(
        "{} faults; last loss sent {last} ms after one; {late} later than {} ms",
        times.len(),
        over / 1_000_000
    );
    let holds = total.wrong == 0 && late == 0 && total.right > 0;
    Row::new(String::new(), promise, report, holds, note)
}
