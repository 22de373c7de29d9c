//! When the agent is killed.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use nix::sys::signal::Signal;
use rand::Rng as _;
use rand::rngs::StdRng;

use super::{BLOCKS, Storm, block, write_churn, write_web};
use crate::policy::CLIENT;
use crate::process::Program;
use crate::{AgentOptions, eventually};

/// Identities of CIDR label sets are numbered from here.
const LOCAL: u32 = 1 << 24;
/// Longest wait until the agent begins to carry out an edited policy.
const NOTICED: Duration = Duration::from_secs(10);
const SOON: Duration = Duration::from_secs(20);
/// Age up to which a confirmation is recent.
const JUST: Duration = Duration::from_secs(5);

/// What the agent is doing at the moment of the kill.
#[derive(Debug)]
pub(super) enum Fault {
    /// It confirmed a new name this many milliseconds ago.
    AfterAck(u64),
    /// It is writing the blocks of a policy, and has written the block with this number.
    WithinPlan(u8),
    /// A selector was added or removed this many milliseconds ago, so that addresses get other
    /// identities.
    Relabelling(u64),
    /// The command that adds or removes an endpoint was started this many milliseconds ago.
    Endpoint(u64),
    /// It was killed, and started again this many milliseconds ago.
    Starting(u64),
}

impl Fault {
    /// Chooses each kind in turn, with a random moment.
    pub(super) fn choose(round: u32, rng: &mut StdRng) -> Self {
        match round % 5 {
            0 => {
                let most = if rng.random_bool(0.2) { 5000 } else { 400 };
                Self::AfterAck(rng.random_range(0..most))
            }
            1 => Self::WithinPlan(rng.random_range(0..BLOCKS - 10)),
            2 => Self::Relabelling(rng.random_range(0..120)),
            3 => Self::Endpoint(rng.random_range(0..400)),
            _ => Self::Starting(rng.random_range(0..500)),
        }
    }
}

impl Storm<'_> {
    pub(super) fn strike(&mut self, fault: &Fault) -> Result<()> {
        let ms = Duration::from_millis;
        match fault {
            Fault::AfterAck(after) => {
                std::thread::sleep(ms(*after));
                self.kill()
            }
            Fault::WithinPlan(at) => self.within_plan(*at),
            Fault::Relabelling(after) => {
                self.named = !self.named;
                write_web(self.lab, self.named)?;
                std::thread::sleep(ms(*after));
                self.kill()
            }
            Fault::Endpoint(after) => self.endpoint(ms(*after)),
            Fault::Starting(after) => {
                self.kill()?;
                let starting = match self.standby.take() {
                    Some(standby) => standby,
                    None => self.start()?,
                };
                std::thread::sleep(ms(*after));
                self.killed_at(Instant::now());
                starting.kill_9()
            }
        }
    }

    fn start(&self) -> Result<Program> {
        let log = self.lab.directory().join("log/agent.log");
        let command = self.lab.agent_command(&AgentOptions::default())?;
        Program::start("holdfast-agent", command, &log)
    }

    fn kill(&mut self) -> Result<()> {
        let agent = self.agent.take().context("no agent")?;
        self.killed_at(Instant::now());
        agent.kill_9()
    }

    /// Counts a kill, and the time since the last confirmation.
    fn killed_at(&mut self, at: Instant) {
        self.outcome.kills += 1;
        let after = self.confirmed.take().map(|confirmed| at - confirmed);
        if let Some(after) = after.filter(|after| *after <= JUST) {
            self.outcome.after_ack += 1;
            self.outcome.longest_after_ack = self.outcome.longest_after_ack.max(after);
        }
    }

    /// Replaces all blocks, and kills the agent when the new block `at` is in the ipcache.
    fn within_plan(&mut self, at: u8) -> Result<()> {
        self.odd = !self.odd;
        let odd = self.odd;
        write_churn(self.lab, odd)?;
        let deadline = Instant::now() + NOTICED;
        while !self.is_there(at, odd)? && Instant::now() < deadline {
            std::hint::spin_loop();
        }
        let agent = self.agent.take().context("no agent")?;
        // When all its threads are stopped, it writes to no map.
        agent.signal(Signal::SIGSTOP)?;
        self.killed_at(Instant::now());
        // The new blocks are added in order, then the old ones are removed in order.
        let whole = self.is_there(BLOCKS - 1, odd)? && !self.is_there(BLOCKS - 1, !odd)?;
        self.outcome.within_plan += u32::from(!whole);
        agent.kill_9()
    }

    fn is_there(&self, number: u8, odd: bool) -> Result<bool> {
        self.is_labelled(block(number, odd))
    }

    /// Whether the kernel's map gives an address the node-local identity of a label set.
    pub(super) fn is_labelled(&self, address: IpAddr) -> Result<bool> {
        let length = if address.is_ipv4() { 32 } else { 128 };
        let key = shared_maps::user::ipcache_key(address, length);
        let value = self.ipcache.get(&key)?;
        Ok(value.is_some_and(|value| value.sec_identity >= LOCAL))
    }

    /// Adds or removes the guest endpoint. The agent may be killed before it responds.
    fn endpoint(&mut self, after: Duration) -> Result<()> {
        self.guest_there = !self.guest_there;
        let (lab, there) = (self.lab, self.guest_there);
        let (guest, key) = self.guest_names();
        let agent = self.agent.take().context("no agent")?;
        let at = std::thread::scope(|scope| -> Result<Instant> {
            scope.spawn(|| {
                // The agent may be killed before it responds.
                let _ = lab.agent(&arguments(&guest, &key, there));
            });
            std::thread::sleep(after);
            let at = Instant::now();
            agent.kill_9()?;
            Ok(at)
        })?;
        self.killed_at(at);
        Ok(())
    }

    fn guest_names(&self) -> (String, String) {
        let guest = self.guest.netns.name().to_owned();
        let key = format!("cli/{guest}/eth0");
        (guest, key)
    }

    /// Repeats the last command, whatever its result was, until it succeeds.
    pub(super) fn settle_guest(&mut self) -> Result<()> {
        let (guest, key) = self.guest_names();
        eventually("the guest endpoint has its final state", SOON, || {
            let listed = self.lab.agent(&["endpoint", "list", "-o", "json"])?;
            if listed.contains(&key) != self.guest_there {
                self.lab.agent(&arguments(&guest, &key, self.guest_there))?;
            }
            Ok(())
        })
    }
}

fn arguments<'a>(guest: &'a str, key: &'a str, there: bool) -> Vec<&'a str> {
    if there {
        vec![
            "endpoint", "add", "--netns", guest, "--ifname", "eth0", "--labels", CLIENT,
        ]
    } else {
        vec!["endpoint", "remove", key]
    }
}
