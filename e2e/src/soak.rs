//! Hours of names through the agent's core in seconds, with loads under which other implementations
//! grew without bound (design, R7).

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use agent_core::core::{Event, snapshot::Summary};
use anyhow::{Result, ensure};

use crate::bench::usage;
use crate::in_memory::{self, DNS, Node, document, web};
use crate::policy::{dns_to, egress};

/// Endpoints among which the queries are divided.
const ENDPOINTS: usize = 10;
/// Number of addresses of a base name.
const ADDRESSES: u32 = 16;
/// Number of names that share one address within twenty minutes, and of addresses of one name. An
/// address in use keeps its expired names while new ones arrive.
const SHARED: u32 = 10_000;
/// Interval at which conntrack is read, seconds.
const PASS: u64 = 30;

/// Number of names, and length of the simulation.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Names that are queried every five minutes. The same number of new names is queried each
    /// hour.
    pub names: u32,
    /// Simulated hours. The second half must not use more resources than the first.
    pub hours: u32,
}

/// State of the simulation at one moment.
#[derive(Clone, Debug)]
pub struct Reading {
    /// Simulated minutes since the start.
    pub minute: u64,
    pub summary: Summary,
    /// Memory of this process, bytes.
    pub memory: u64,
    /// Longest time of one event since the previous reading.
    pub longest: Duration,
}

struct Soak {
    node: Node,
    size: Size,
    second: u64,
    longest: Duration,
    realised: u64,
    asked: u64,
}

/// Runs the simulation. Returns one reading for every ten simulated minutes.
pub fn play(size: Size) -> Result<Vec<Reading>> {
    let rules = dns_to("*", &[&format!("{DNS}/32")])
        + "- toFQDNs: [{matchPattern: \"*.example.com\"}, {matchPattern: \"**.example.net\"}]\n";
    let policy = document(&egress("names", "web", &rules))?;
    let mut soak = Soak {
        node: Node::start(
            in_memory::config_by_default(),
            &[policy],
            &vec![web(None); ENDPOINTS],
        )?,
        size,
        second: 0,
        longest: Duration::ZERO,
        realised: 0,
        asked: 0,
    };
    let mut readings = Vec::new();
    while soak.second < u64::from(size.hours) * 3600 {
        soak.step()?;
        if soak.second.is_multiple_of(600) {
            readings.push(soak.read()?);
        }
    }
    // Mappings over an endpoint's limits are counted, all others are realised.
    let counters = &soak.node.counters();
    let results = soak.realised + counters.mappings_not_realised + counters.pairs_left_out;
    ensure!(
        results >= soak.asked,
        "{results} results for {} mappings",
        soak.asked
    );
    Ok(readings)
}

impl Soak {
    /// Simulates one second: sends the queries that are due and handles their events.
    fn step(&mut self) -> Result<()> {
        self.second += 1;
        self.node.now = self.node.now.plus_secs(1);
        let second = u32::try_from(self.second)?;
        let mut events = Vec::new();
        let mut answer = |node: &mut Node, who: u32, name: String, addresses, ttl| {
            events.push(node.answer(who as usize, &name, addresses, ttl)?);
            anyhow::Ok(())
        };
        // Base names, each every 300 s, with constant addresses.
        for n in (0..self.size.names).filter(|n| n % 300 == second % 300) {
            let addresses = (0..ADDRESSES).map(|a| address(0x0a00_0000 + n * ADDRESSES + a));
            answer(
                &mut self.node,
                n,
                format!("n{n}.example.com"),
                addresses.collect(),
                300,
            )?;
        }
        // New names, each with an address, which are used once and never again.
        for n in fresh(self.size.names, second) {
            let name = format!("f{n}.example.com");
            answer(&mut self.node, n, name, vec![address(0x2000_0000 + n)], 60)?;
        }
        // One name with many addresses, and one address with many names.
        let bucket = (0..8).map(|n| address(0x3000_0000 + (second * 8 + n) % SHARED));
        answer(
            &mut self.node,
            0,
            "bucket.example.com".into(),
            bucket.collect(),
            5,
        )?;
        for n in fresh(3 * SHARED, second) {
            let name = format!("t{}.tenants.example.net", n % SHARED);
            answer(&mut self.node, 1, name, vec![address(0x4000_0000)], 300)?;
        }
        self.asked += events.len() as u64;
        self.event(Event::Mappings(events));
        if self.second.is_multiple_of(PASS) {
            // Some connections stay open.
            let kept = (0..100).map(|n| (in_memory::client(n % 10), address(0x0a00_0000 + n)));
            let gc_start = self.node.now;
            let alive = kept.collect();
            self.event(Event::Liveness {
                gc_start,
                alive,
                complete: true,
            });
        }
        Ok(())
    }

    fn event(&mut self, event: Event) {
        let cost = self.node.event(event);
        self.longest = self.longest.max(cost.longest);
        self.realised += cost.realised;
    }

    fn read(&mut self) -> Result<Reading> {
        Ok(Reading {
            minute: self.second / 60,
            summary: self.node.core.summary(),
            memory: usage::resident(std::process::id())?,
            longest: std::mem::take(&mut self.longest),
        })
    }
}

/// Numbers of the new names that are due in this second, at `hourly` per hour.
fn fresh(hourly: u32, second: u32) -> std::ops::Range<u32> {
    let until = |second: u32| {
        let all = u64::from(hourly) * u64::from(second) / 3600;
        u32::try_from(all).unwrap_or(u32::MAX)
    };
    until(second - 1)..until(second)
}

fn address(bits: u32) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from_bits(bits))
}
