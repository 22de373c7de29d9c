//! R1: whatever happens to the agent, names are answered.

use std::time::Duration;

use anyhow::Result;

use super::Row;
use super::stage::{LEAVES, Stage};
use crate::node::AgentOptions;
use crate::process::Program;

/// Steps of the crash loop: how long the agent gets to start each time.
const LIVES: [u64; 8] = [5, 20, 40, 80, 120, 200, 300, 500];

/// Agent killed and started again.
pub(super) fn killed(stage: &Stage) -> Result<Vec<Row>> {
    under_load(stage, |agent, _| {
        agent.kill_9()?;
        // Down for a moment, so that answers come from which no agent learns.
        std::thread::sleep(stage.size.pause);
        stage.lab.start_agent(&stage.agent_options())
    })
}

/// Agent ended and started again.
pub(super) fn restarted(stage: &Stage) -> Result<Vec<Row>> {
    under_load(stage, |agent, _| {
        agent.terminate(LEAVES)?;
        stage.lab.start_agent(&stage.agent_options())
    })
}

/// Agent killed in the middle of its start, at ever later moments.
pub(super) fn crash_loop(stage: &Stage) -> Result<Vec<Row>> {
    under_load(stage, |agent, round| {
        agent.kill_9()?;
        for life in LIVES {
            let command = stage.lab.agent_command(&stage.agent_options())?;
            let log = stage.lab.directory().join("log/agent.log");
            let short = Program::start("holdfast-agent", command, &log)?;
            std::thread::sleep(Duration::from_millis(life + 7 * u64::from(round)));
            short.kill_9()?;
        }
        stage.lab.start_agent(&stage.agent_options())
    })
}

/// Agent restarted with its built-in proxy, and without.
pub(super) fn flipped(stage: &Stage) -> Result<Vec<Row>> {
    under_load(stage, |agent, round| {
        agent.terminate(LEAVES)?;
        let builtin = round.is_multiple_of(2);
        stage.lab.start_agent(&AgentOptions {
            builtin,
            ..stage.agent_options()
        })
    })
}

fn under_load(stage: &Stage, fault: impl Fn(Program, u32) -> Result<Program>) -> Result<Vec<Row>> {
    let mut agent = stage.agent(&stage.agent_options())?;
    let _replica = stage.replica(1)?;
    let load = stage.load()?;
    for round in 0..stage.size.faults {
        load.flows()?;
        agent = fault(agent, round)?;
    }
    load.flows()?;
    let report = load.finish()?;
    let timeouts = stage
        .lab
        .metric(9971, "holdfast_dns_upstream_timeouts_total", "")?;
    let overflow = stage
        .lab
        .metric(9971, "holdfast_dns_receive_overflow_total", "")?;
    let note = format!(
        "{} times; {}; {timeouts} queries that the server did not answer, {overflow} lost in a \
         full queue",
        stage.size.faults,
        stage.drops()?
    );
    Ok(vec![Row::none_lost(String::new(), &report, note)])
}
