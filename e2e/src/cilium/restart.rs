//! Starts of the agent, as observed with a real one. It makes an empty ipcache map. It streams
//! states with a part of the prefixes, then states without rules. It streams rules only after it
//! has regenerated the endpoints.

use std::time::Duration;

use anyhow::Result;

use super::world::World;
use super::{CiliumAgent, Manner, place};
use crate::lab::Lab;

/// A start of the agent, with the agent's data and the length of the phases.
#[derive(Clone, Debug)]
pub struct Start<'a> {
    pub lab: &'a Lab,
    /// The agent's data at the end of the start.
    pub world: &'a World,
    pub manner: Manner,
    /// Whether the agent has BPF maps.
    pub maps: bool,
    pub phase: Duration,
}

impl Start<'_> {
    /// Runs until the empty map exists, which is the state that a kill at that time leaves.
    pub fn killed_after_the_map(&self) -> Result<()> {
        place::repin_ipcache(self.lab)?;
        std::thread::sleep(self.phase);
        Ok(())
    }

    /// Goes as far as the states without rules.
    pub fn without_rules(&self) -> Result<CiliumAgent> {
        if self.maps {
            place::repin_ipcache(self.lab)?;
            std::thread::sleep(self.phase);
        }
        let agent = CiliumAgent::start(&self.lab.node, self.world.at_start(), self.manner.clone())?;
        std::thread::sleep(self.phase);
        if self.maps {
            place::pin_ipcache(self.lab, self.world)?;
        }
        agent.change(|world| *world = self.world.without_rules());
        std::thread::sleep(self.phase);
        Ok(agent)
    }

    /// Goes through all phases, up to the states with rules.
    pub fn whole(&self) -> Result<CiliumAgent> {
        let agent = self.without_rules()?;
        agent.change(|world| *world = self.world.clone());
        std::thread::sleep(self.phase);
        Ok(agent)
    }
}
