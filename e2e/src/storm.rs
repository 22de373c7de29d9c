//! Kills of the agent at random times, while names are queried, policy is edited, and endpoints are
//! added and removed. Pods must not be affected, which is checked all the time.

mod faults;
mod probe;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use shared_maps::ipcache::{IpcacheKey, IpcacheValue};
use shared_maps::user::{Access, Globals, Map};

use self::faults::Fault;
pub use self::probe::Probe;
use crate::lab::{DNS4, Lab, UDP_PORT, at, other4, web4, web6};
use crate::pod::{Pod, Stream};
use crate::policy::{CLIENT, cidr, dns, egress, names};
use crate::standby::{expect_owner, standing_by};
use crate::web::Web;
use crate::{AgentOptions, Program, Query, SdpOptions, eventually};

/// The name that is always open.
const STEADY: &str = "steady.good.test";
/// Longest time until names learned without the agent are open.
const BACK: Duration = Duration::from_secs(10);
/// Number of CIDR blocks that each edit of the changing policy adds. It removes as many.
const BLOCKS: u8 = 250;

/// The counts of a storm.
#[derive(Debug, Default)]
pub struct StormReport {
    /// Number of kills of a ready or of a starting agent.
    pub kills: u32,
    /// Number of kills that left a map partly written.
    pub within_plan: u32,
    /// Number of kills within five seconds of the agent's confirmation of a new name. The time
    /// counts from the released answer. A starting agent has confirmed nothing.
    pub after_ack: u32,
    /// Longest time between a confirmation and such a kill.
    pub longest_after_ack: Duration,
    /// New connections and datagrams to open addresses. Each was answered.
    pub allowed: u64,
    /// Datagrams and connections to closed addresses. None was delivered.
    pub denied: u64,
    /// Names that the load queried. Each was answered.
    pub asked: u64,
}

/// A lab in a storm.
pub(crate) struct Storm<'l> {
    lab: &'l Lab,
    rng: StdRng,
    agent: Option<Program>,
    successor: Successor,
    /// Waits for the agent's end.
    standby: Option<Program>,
    standbys: u32,
    guest: Pod,
    guest_there: bool,
    /// Which of the two sets of blocks the changing policy has.
    odd: bool,
    /// Whether pod a's policy also names [`STEADY`].
    named: bool,
    ipcache: Map<IpcacheKey, IpcacheValue>,
    /// When the running agent last confirmed a new name.
    confirmed: Option<Instant>,
    outcome: StormReport,
}

/// Who owns the node after a kill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Successor {
    /// The agent is started again.
    Restart,
    /// Another agent stands by.
    Standby,
}

/// Kills the agent `kills` times. `seed` determines every time and choice.
pub fn play(lab: &Lab, seed: u64, kills: u32, successor: Successor) -> Result<StormReport> {
    lab.zone.set(STEADY, &[web4(10)], 600);
    lab.zone.set("six.good.test", &[web6(10)], 600);
    write_web(lab, false)?;
    write_churn(lab, false)?;
    let agent = lab.start_agent(&options(successor))?;
    let _sdp = lab.start_sdp(&SdpOptions::default())?;
    lab.add_endpoint(&lab.a, crate::policy::WEB)?;
    lab.add_endpoint(&lab.b, CLIENT)?;
    for pod in [&lab.a, &lab.b] {
        pod.ask(&Query::a(STEADY, DNS4))?.expect(web4(10))?;
        pod.ask(&Query::aaaa("six.good.test", DNS4))?
            .expect(web6(10))?;
    }
    let mut storm = Storm {
        lab,
        rng: StdRng::seed_from_u64(seed),
        agent: Some(agent),
        successor,
        standby: None,
        standbys: 0,
        guest: lab.add_pod("guest", 13)?,
        guest_there: false,
        odd: false,
        named: false,
        ipcache: Globals::new(lab.bpf_root()).ipcache(Access::ReadWrite)?,
        confirmed: None,
        outcome: StormReport::default(),
    };
    let open = [
        Probe::open(&lab.a, web4(10))?,
        Probe::open(&lab.a, web6(10))?,
        Probe::open(&lab.b, web4(10))?,
    ];
    let closed_at = [web4(12), web6(12), other4(10)];
    let closed = closed_at.map(|address| Probe::closed(&lab.a, address));
    let streams = [
        lab.a.stream(at(web4(10), 80))?,
        lab.a.stream(at(web6(10), 80))?,
        lab.b.stream(at(web4(10), 80))?,
    ];
    let load = Load::default();
    storm.stand_by()?;
    std::thread::scope(|scope| -> Result<()> {
        scope.spawn(|| load.run(&lab.b, lab));
        let played = storm.rounds(kills, &streams, &load);
        load.stop.store(true, Ordering::Relaxed);
        played
    })?;
    storm.outcome.asked = load.finish()?;
    for probe in open {
        storm.outcome.allowed += probe.finish()?;
    }
    for probe in closed {
        storm.outcome.denied += probe?.finish()?;
    }
    for address in closed_at {
        for port in [UDP_PORT, 80] {
            let visits = lab.web.visits(at(address, port));
            ensure!(
                visits == 0,
                "{address} port {port} was reached {visits} times"
            );
        }
    }
    // The standby ends first: otherwise it would take over.
    drop(storm.standby.take());
    drop(storm.agent.take());
    Ok(storm.outcome)
}

impl Storm<'_> {
    fn rounds(&mut self, kills: u32, streams: &[Stream], load: &Load) -> Result<()> {
        let mut round = 0;
        while self.outcome.kills < kills {
            let fault = Fault::choose(round, &mut self.rng);
            let start = Instant::now();
            self.round(round, &fault, streams)
                .with_context(|| format!("round {round}, {fault:?}"))?;
            load.check()?;
            eprintln!(
                "round {round}: {fault:?}, {:.1} s; of {} kills {} within 5 s of a confirmation, {} within a plan",
                start.elapsed().as_secs_f32(),
                self.outcome.kills,
                self.outcome.after_ack,
                self.outcome.within_plan,
            );
            round += 1;
        }
        Ok(())
    }

    fn round(&mut self, number: u32, fault: &Fault, streams: &[Stream]) -> Result<()> {
        // A name that is new to every agent. The agent confirms it just before the kill.
        let fresh = fresh(number)?;
        let name = format!("k{number}.good.test");
        self.lab
            .world
            .batch(&format!("address add {fresh} dev lo"))?;
        // The kernel makes an address usable from a work queue that all namespaces share.
        let _echo = eventually("the address can be used", BACK, || {
            Web::start(&self.lab.world, &[fresh], &[], &[UDP_PORT])
        })?;
        // A lease ends within the hour, for any TTL.
        let ttl = if number.is_multiple_of(2) {
            600
        } else {
            86_400
        };
        self.lab.zone.set(&name, &[fresh], ttl);
        let before = self.numbers()?;
        let query = match fresh {
            IpAddr::V4(_) => Query::a(&name, DNS4),
            IpAddr::V6(_) => Query::aaaa(&name, DNS4),
        };
        self.agent.as_mut().context("no agent")?.check_repairs_now();
        self.lab.a.ask(&query)?.expect(fresh)?;
        // An answer that the proxy released because the agent was late is not a confirmation.
        self.confirmed = self.is_labelled(fresh)?.then(Instant::now);
        let probe = Probe::open(&self.lab.a, fresh)?;
        self.strike(fault)?;
        let away = self.rng.random_range(0..400);
        std::thread::sleep(Duration::from_millis(away));
        self.succeed()?;

        let after = self.numbers()?;
        for (labels, number) in &before {
            let now = after.get(labels);
            ensure!(
                now.is_none_or(|now| now == number),
                "{labels} had number {number}, has {now:?}"
            );
        }
        let kept = before.keys().filter(|labels| after.contains_key(*labels));
        let kept: BTreeSet<&String> = kept.collect();
        for part in ["app=web", "app=client", "fqdn:*.good.test"] {
            ensure!(
                kept.iter().any(|labels| labels.contains(part)),
                "no {part} is left"
            );
        }
        for stream in streams {
            stream.expect_alive()?;
        }
        self.lab.connected("one")?;
        self.settle_guest()?;
        self.lab.audit_settled("good.test", BACK)?;
        self.outcome.allowed += probe.finish()?;
        Ok(())
    }

    /// The agent that stands by owns the node, or the agent is started again.
    fn succeed(&mut self) -> Result<()> {
        self.agent = Some(match self.standby.take() {
            Some(standby) => {
                expect_owner(self.lab, &standby)?;
                standby
            }
            None => self.lab.start_agent(&options(self.successor))?,
        });
        self.stand_by()
    }

    fn stand_by(&mut self) -> Result<()> {
        if self.successor == Successor::Standby {
            self.standbys += 1;
            let name = format!("standby{}", self.standbys);
            self.standby = Some(standing_by(self.lab, &name, &options(self.successor))?);
        }
        Ok(())
    }

    /// Identities by label set, straight from the agent.
    fn numbers(&self) -> Result<BTreeMap<String, u64>> {
        let identities = self.lab.identities()?;
        Ok(identities
            .into_iter()
            .map(|(id, labels)| (labels, id))
            .collect())
    }
}

fn options(successor: Successor) -> AgentOptions {
    match successor {
        Successor::Restart => AgentOptions::default(),
        // A storm is a loop of takeovers: the brake has tests of its own.
        Successor::Standby => AgentOptions::default()
            .flag("--standby")
            .flag("--standby-max-delay=0s"),
    }
}

/// Pod a's policy: names below `good.test`. With `named`, it also names one of them, which changes
/// the identity of that name's addresses.
fn write_web(lab: &Lab, named: bool) -> Result<()> {
    let more = if named { names(STEADY) } else { String::new() };
    let rules = dns("*.good.test") + &names("*.good.test") + &more;
    lab.write_policy("web.yaml", &egress("web", "web", &rules))
}

/// Pod b's policy: the same names, and blocks of one of two sets.
fn write_churn(lab: &Lab, odd: bool) -> Result<()> {
    let blocks: String = (0..BLOCKS)
        .map(|n| cidr(&format!("{}/32", block(n, odd))))
        .collect();
    let rules = dns("*.good.test") + &names("*.good.test") + &blocks;
    lab.write_policy("churn.yaml", &egress("churn", "client", &rules))
}

/// The address of this round's name, different in each round.
fn fresh(round: u32) -> Result<IpAddr> {
    let host = u8::try_from(round / 2)?;
    Ok(if round.is_multiple_of(2) {
        IpAddr::from([
            203,
            0,
            113,
            host.checked_add(20).context("too many rounds")?,
        ])
    } else {
        IpAddr::from([0x2001, 0xdb8, 0x113, 0, 0, 0, 1, u16::from(host)])
    })
}

fn block(number: u8, odd: bool) -> IpAddr {
    IpAddr::from([10, 100, u8::from(odd), number])
}

/// Names queried without pause. Each must be answered in every state of the agent.
#[derive(Default)]
struct Load {
    stop: AtomicBool,
    asked: Mutex<u64>,
    failed: Mutex<Option<String>>,
}

impl Load {
    fn run(&self, pod: &Pod, lab: &Lab) {
        let mut number = 0;
        while !self.stop.load(Ordering::Relaxed) {
            let name = format!("l{}.good.test", number % 500);
            lab.zone.set(&name, &[web4(10)], 600);
            let asked = pod
                .ask(&Query::a(&name, DNS4).within(Duration::from_secs(5)))
                .and_then(|reply| reply.expect(web4(10)));
            match asked {
                Ok(_) => *self.asked.lock() += 1,
                Err(error) => {
                    *self.failed.lock() = Some(format!("{name}: {error:#}"));
                    return;
                }
            }
            number += 1;
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn check(&self) -> Result<()> {
        match &*self.failed.lock() {
            Some(error) => Err(anyhow::anyhow!("the load: {error}")),
            None => Ok(()),
        }
    }

    fn finish(self) -> Result<u64> {
        self.check()?;
        Ok(*self.asked.lock())
    }
}
