//! R1: names are answered in every state of the agent.

use std::time::Duration;

use anyhow::Result;

use super::Row;
use super::setup::{LEAVES, Setup};
use crate::node::AgentOptions;
use crate::process::Program;

/// Milliseconds from each start of the agent until it is killed, in the crash loop.
const LIVES: [u64; 8] = [5, 20, 40, 80, 120, 200, 300, 500];

/// The agent is killed and started again.
pub(super) fn killed(setup: &Setup) -> Result<Vec<Row>> {
    under_load(setup, |agent, _| {
        agent.kill_9()?;
        // The agent is down for a moment, so that it misses some answers.
        std::thread::sleep(setup.size.pause);
        setup.lab.start_agent(&setup.agent_options())
    })
}

/// The agent is ended and started again.
pub(super) fn restarted(setup: &Setup) -> Result<Vec<Row>> {
    under_load(setup, |agent, _| {
        agent.terminate(LEAVES)?;
        setup.lab.start_agent(&setup.agent_options())
    })
}

/// Kills the agent during its start, at later and later times.
pub(super) fn crash_loop(setup: &Setup) -> Result<Vec<Row>> {
    under_load(setup, |agent, round| {
        agent.kill_9()?;
        for life in LIVES {
            let command = setup.lab.agent_command(&setup.agent_options())?;
            let log = setup.lab.directory().join("log/agent.log");
            let short = Program::start("holdfast-agent", command, &log)?;
            std::thread::sleep(Duration::from_millis(life + 7 * u64::from(round)));
            short.kill_9()?;
        }
        setup.lab.start_agent(&setup.agent_options())
    })
}

/// The agent is restarted alternately with and without its built-in proxy.
pub(super) fn flipped(setup: &Setup) -> Result<Vec<Row>> {
    under_load(setup, |agent, round| {
        agent.terminate(LEAVES)?;
        let builtin = round.is_multiple_of(2);
        setup.lab.start_agent(&AgentOptions {
            builtin,
            ..setup.agent_options()
        })
    })
}

fn under_load(setup: &Setup, fault: impl Fn(Program, u32) -> Result<Program>) -> Result<Vec<Row>> {
    let mut agent = setup.agent(&setup.agent_options())?;
    let _replica = setup.replica(1)?;
    let load = setup.load()?;
    for round in 0..setup.size.faults {
        load.flows()?;
        agent = fault(agent, round)?;
    }
    load.flows()?;
    let report = load.finish()?;
    let timeouts = setup
        .lab
        .metric(9971, "holdfast_dns_upstream_timeouts_total", "")?;
    let overflow = setup
        .lab
        .metric(9971, "holdfast_dns_receive_overflow_total", "")?;
    let note = format!(
        "{} times; {}; {timeouts} queries that the server did not answer, {overflow} lost in a \
         full queue",
        setup.size.faults,
        setup.drops()?
    );
    Ok(vec![Row::none_lost(String::new(), &report, note)])
}
