//! R1 on a full node: what is asked while no agent owns the node opens soon, with and without a
//! standby agent.

use std::net::{IpAddr, Ipv4Addr};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use shared_maps::ipcache::IpcacheKey;
use shared_maps::user::{Access, Globals};

use super::Row;
use super::setup::Setup;
use crate::Query;
use crate::cni::{Runtime, Sandbox};
use crate::lab::{DNS4, Lab};
use crate::node::AgentOptions;
use crate::pod::Pod;
use crate::policy;
use crate::process::Program;
use crate::standby::{StoppedCore, expect_owner, standing_by};

/// The first address of the node's further pods.
const FIRST: u8 = 15;
/// Number of names that are asked after each fault, one every [`EVERY`].
const ASKED: u16 = 20;
const EVERY: Duration = Duration::from_millis(20);
/// Longest wait until everything that was asked is open.
const OPENS: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(1);
/// An address that no policy and no name is about.
const NOWHERE: Ipv4Addr = Ipv4Addr::new(192, 88, 99, 1);

/// What ends the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Killed,
    /// The owner's core is stopped, so its watchdog ends it.
    Hung,
}

/// Who owns the node next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Standby,
    /// The agent is started again at once.
    Restart,
}

/// Promised times from a question to its effect.
#[derive(Clone, Copy, Debug)]
struct Limits {
    name: Duration,
    pod: Duration,
    policy: Duration,
}

impl Limits {
    fn after(end: End) -> Self {
        let away = match end {
            End::Killed => Duration::ZERO,
            // The watchdog waits ten seconds, plus its ticks.
            End::Hung => Duration::from_millis(11_700),
        };
        Self {
            name: away + Duration::from_millis(300),
            pod: away + Duration::from_millis(500),
            policy: away + Duration::from_millis(500),
        }
    }
}

/// Times from a question to its effect.
#[derive(Debug, Default)]
struct Times {
    names: Vec<Duration>,
    pods: Vec<Duration>,
    policies: Vec<Duration>,
}

/// Ends the owner again and again, under load.
pub(super) fn taken(setup: &Setup, end: End, next: Next) -> Result<Vec<Row>> {
    let mut node = FullNode::new(setup, next)?;
    let _replicas = [setup.replica(1)?, setup.replica(2)?];
    node.learn()?;
    let load = setup.load()?;
    let mut times = Times::default();
    for round in 0..setup.size.faults {
        load.flows()?;
        node.round(end, round, &mut times)?;
    }
    load.flows()?;
    let report = load.finish()?;
    let limits = Limits::after(end);
    let within = longest(&times.names) <= limits.name
        && longest(&times.pods) <= limits.pod
        && longest(&times.policies) <= limits.policy;
    let note = format!(
        "{} times, {} endpoints, {} policies, {} names known; from question to effect, median and longest: names {}, \
         ADD {}, policies {}; {}",
        setup.size.faults,
        node.sandboxes.len() + 4,
        setup.size.policies,
        setup.size.known,
        told(&mut times.names),
        told(&mut times.pods),
        told(&mut times.policies),
        setup.drops()?
    );
    drop(node);
    let mut row = Row::none_lost(String::new(), &report, note);
    row.promise = super::SOON_AGAIN;
    // The promise does not cover a restarted agent: its figures are only for comparison.
    row.holds &= within || next == Next::Restart || !setup.size.judges_times;
    Ok(vec![row])
}

/// A node with many endpoints, policies and names, and its owner.
struct FullNode<'a> {
    setup: &'a Setup,
    runtime: Runtime,
    pods: Vec<Pod>,
    sandboxes: Vec<Sandbox>,
    /// Pods that are not started yet.
    spare: Vec<Sandbox>,
    owner: Option<Program>,
    standby: Option<Program>,
    next: Next,
    started: u32,
}

impl<'a> FullNode<'a> {
    fn new(setup: &'a Setup, next: Next) -> Result<Self> {
        let lab = &setup.lab;
        let count = setup.size.endpoints + u8::try_from(setup.size.faults)?;
        let names: Vec<(String, u8)> = (FIRST..)
            .take(usize::from(count))
            .map(|host| (format!("t{host}"), host))
            .collect();
        let pods = names.iter().map(|(name, host)| lab.add_pod(name, *host));
        let pods = pods.collect::<Result<Vec<Pod>>>()?;
        let documents: String = names.iter().map(|(name, _)| document(name)).collect();
        lab.write_policy("pods.yaml", &documents)?;
        for number in 0..setup.size.policies {
            let rules = policy::cidr(&format!("198.51.{number}.0/24"));
            let text = policy::egress(&format!("further-{number}"), "web", &rules);
            lab.write_policy(&format!("further-{number}.yaml"), &text)?;
        }
        let mut sandboxes: Vec<Sandbox> = pods
            .iter()
            .zip(&names)
            .map(|(pod, (name, _))| Sandbox::new(pod, name))
            .collect();
        let spare = sandboxes.split_off(usize::from(setup.size.endpoints));
        let mut node = Self {
            setup,
            runtime: Runtime::new(lab)?,
            pods,
            sandboxes,
            spare,
            owner: None,
            standby: None,
            next,
            started: 0,
        };
        node.owner = Some(setup.agent(&node.options())?);
        for sandbox in &node.sandboxes {
            node.runtime.start(sandbox)?;
        }
        if next == Next::Standby {
            node.standby = Some(node.stand_by()?);
        }
        Ok(node)
    }

    fn options(&self) -> AgentOptions {
        let socket = format!("--cni-socket={}", self.setup.lab.cni_socket().display());
        // Each round is a takeover: the brake would be measured, too.
        self.setup
            .agent_options()
            .flag("--standby")
            .flag("--standby-max-delay=0s")
            .flag(&socket)
    }

    fn stand_by(&mut self) -> Result<Program> {
        self.started += 1;
        let name = format!("standby{}", self.started);
        standing_by(&self.setup.lab, &name, &self.options())
    }

    /// Makes the pods look up names, so that the agent knows the names.
    fn learn(&self) -> Result<()> {
        let lab = &self.setup.lab;
        let pods: Vec<&Pod> = self.setup.clients().collect();
        for number in 0..self.setup.size.known {
            let name = format!("known{number}.good.test");
            let address = IpAddr::V4(Ipv4Addr::from_bits(
                Ipv4Addr::new(198, 18, 0, 0).to_bits() + u32::from(number),
            ));
            lab.zone.set(&name, &[address], 3600);
            let at = usize::from(number) % pods.len();
            let pod = pods.get(at).context("no pods")?;
            pod.ask(&Query::a(&name, DNS4))?.expect(address)?;
        }
        Ok(())
    }

    /// Ends the owner, asks for everything, and waits for the next owner.
    fn round(&mut self, end: End, round: u32, times: &mut Times) -> Result<()> {
        let owner = self.owner.take().context("no owner")?;
        let spare = self.spare.pop().context("no pod is left")?;
        let ended = Instant::now();
        let hung = match end {
            End::Killed => {
                owner.kill_9()?;
                None
            }
            End::Hung => Some((StoppedCore::of(&owner)?, owner)),
        };
        let (setup, runtime) = (self.setup, &self.runtime);
        let restarted = thread::scope(|scope| -> Result<Option<Program>> {
            let pod = scope.spawn(|| timed(|| runtime.start(&spare)));
            let policy = scope.spawn(|| timed(|| new_policy(&setup.lab, round)));
            let names: Vec<_> = (0..ASKED)
                .map(|number| scope.spawn(move || new_name(setup, round, number)))
                .collect();
            let restarted = match (self.next, end) {
                (Next::Restart, End::Killed) => Some(setup.lab.start_agent(&self.options())?),
                _ => None,
            };
            if let Some((core, _)) = hung {
                core.ends()?;
            }
            times.pods.push(joined(pod)?);
            times.policies.push(joined(policy)?);
            for name in names {
                times.names.push(joined(name)?);
            }
            Ok(restarted)
        })?;
        eprintln!(
            "round {round}: all open {:?} after the end",
            ended.elapsed()
        );
        self.sandboxes.push(spare);
        let owner = match restarted {
            Some(owner) => owner,
            None => self.standby.take().context("no standby")?,
        };
        expect_owner(&setup.lab, &owner)?;
        self.owner = Some(owner);
        if self.next == Next::Standby {
            self.standby = Some(self.stand_by()?);
        }
        Ok(())
    }
}

impl Drop for FullNode<'_> {
    fn drop(&mut self) {
        // The standby ends first: otherwise it would take over.
        drop(self.standby.take());
        drop(self.owner.take());
        self.pods.clear();
    }
}

fn document(name: &str) -> String {
    format!(
        r"
apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: default, uid: uid-{name}, labels: {{app: web}}}}
---
"
    )
}

/// Time from the question for a new name until its address is open.
fn new_name(setup: &Setup, round: u32, number: u16) -> Result<Duration> {
    let name = format!("gap{round}x{number}.good.test");
    let [high, low] = number.to_be_bytes();
    let address = Ipv4Addr::new(198, 19, u8::try_from(round)?, low);
    ensure!(high == 0, "too many names");
    setup.lab.zone.set(&name, &[address.into()], 3600);
    let pods: Vec<&Pod> = setup.clients().collect();
    let at = usize::from(number) % pods.len();
    let pod = pods.get(at).context("no pods")?;
    thread::sleep(EVERY * u32::from(number));
    timed(|| {
        pod.ask(&Query::a(&name, DNS4))?.expect(address.into())?;
        opens(&setup.lab, IpcacheKey::v4(address.octets(), 32)).with_context(|| name.clone())
    })
}

/// Writes a policy, and waits until it is in force.
fn new_policy(lab: &Lab, round: u32) -> Result<()> {
    let prefix = Ipv4Addr::new(198, 51, 200, u8::try_from(round)?);
    let rules = policy::cidr(&format!("{prefix}/32"));
    let text = policy::egress(&format!("gap-{round}"), "web", &rules);
    lab.write_policy(&format!("gap-{round}.yaml"), &text)?;
    opens(lab, IpcacheKey::v4(prefix.octets(), 32)).context("the policy")
}

/// Waits until an address has an identity of its own. Without one, a look-up gives the identity of
/// a shorter prefix.
fn opens(lab: &Lab, key: IpcacheKey) -> Result<()> {
    let map = Globals::new(lab.bpf_root()).ipcache(Access::ReadOnly)?;
    let world = map.get(&IpcacheKey::v4(NOWHERE.octets(), 32))?;
    let begin = Instant::now();
    while map.get(&key)? == world {
        ensure!(begin.elapsed() < OPENS, "it does not open");
        thread::sleep(LOOK);
    }
    Ok(())
}

fn timed(act: impl FnOnce() -> Result<()>) -> Result<Duration> {
    let begin = Instant::now();
    act()?;
    Ok(begin.elapsed())
}

fn joined<T>(thread: thread::ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    let joined = thread.join();
    joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn longest(times: &[Duration]) -> Duration {
    times.iter().copied().max().unwrap_or_default()
}

fn told(times: &mut [Duration]) -> String {
    times.sort_unstable();
    let middle = times.get(times.len() / 2).copied().unwrap_or_default();
    format!(
        "{} and {} ms",
        middle.as_millis(),
        longest(times).as_millis()
    )
}
