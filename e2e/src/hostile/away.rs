//! Names that pod B learns while the agent is down stay open, however many names pod A learns.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::attack::ask_large_names;
use super::setup::{LARGE_NAMES, SERVER4, Setup, start_agent};
use crate::dns::probe::Query;
use crate::lab::at;
use crate::traffic::names as zone;
use crate::wait::eventually;

/// Number of names that B looks up while the agent is down.
const NAMES: usize = 30;
/// Longest time from the agent's readiness until all of B's names are open.
const OPEN_WITHIN: Duration = Duration::from_secs(10);

impl Setup {
    /// Kills the agent. B learns names, and then A learns the addresses of 64 large answers. Starts
    /// the agent again. Fails unless every address of B opens.
    pub fn learns_while_the_agent_is_away(&mut self) -> Result<()> {
        let pid = self.agent.id();
        self.agent.signal(nix::sys::signal::Signal::SIGKILL)?;
        self.agent.wait(OPEN_WITHIN)?;
        let mut learned = Vec::new();
        for _ in 0..NAMES {
            let number = self.next_name();
            let query = Query::a(&zone::name(number), SERVER4);
            self.lab.b.ask(&query)?.expect(zone::v4(number).into())?;
            learned.push(number);
        }
        let answered = self.lab.a.netns.enter(|| ask_large_names(LARGE_NAMES))?;
        ensure!(answered > LARGE_NAMES / 2, "A got {answered} large answers");
        self.agent = start_agent(&self.lab)?;
        ensure!(self.agent.id() != pid, "the agent did not restart");
        for number in learned {
            eventually(
                "a name learned without the agent is open",
                OPEN_WITHIN,
                || self.lab.b.expect_open(at(zone::v4(number).into(), 80)),
            )?;
        }
        Ok(())
    }
}
