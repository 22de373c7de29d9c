//! What the node needs besides the endpoints' programs: checked all the time, repaired, counted.
//!
//! Routes, the steering program and the pins of the maps are set up at the start; anything on the
//! node may remove them later. Programs of endpoints are checked by the core
//! ([`agent_core::core::Core::next_query`]), because it attaches them.

use std::{
    collections::BTreeMap,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

use daemon::{label, port_hold::PortHold, steering_program};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use shared_maps::{
    pin, redirect, steering,
    user::{Globals, HeldPin},
};
use tokio_util::sync::CancellationToken;

use super::{
    features::KernelView,
    kernel,
    nf_tables::TableEvents,
    nftables::{self, Family},
    root::make_dirs,
    routing, tunnel,
    unclaimed::ClosedNames,
};

/// Between two checks: with the check itself and the repair well below five seconds.
const INTERVAL: Duration = Duration::from_secs(2);
/// After a check that a change of nftables tables caused: a program that removes them again and again
/// does not take the agent's CPU time.
const PAUSE: Duration = Duration::from_millis(100);

label! {
    /// A part of the node's datapath that the agent checks and repairs, and what a fault of it means.
    #[derive(PartialOrd, Ord)]
    Part = "part" {
        /// Redirected packets do not reach the proxies, so their queries are lost.
        Routes => "routes",
        /// Packets that skip the programs pass, and queries to an address that the node translates
        /// (a ClusterIP) time out.
        Netfilter => "netfilter",
        /// The steering program does not select a live proxy for redirected packets.
        Steering => "steering",
        /// New endpoints would use other maps than existing endpoints.
        Pins => "pins",
        /// Another user has the proxy port: no proxy can start.
        Port => "port",
        /// The lock file of the state directory is gone and cannot be made again: an agent with another BPF root
        /// could use the same directory.
        Lock => "lock",
    }
}

/// State of a part at its last check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Condition {
    /// Times that it was repaired.
    pub repairs: u64,
    /// What is wrong now and could not be repaired.
    pub fault: Option<String>,
}

/// Repairs of a part of the datapath that something else had changed.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct RepairsView {
    /// `routes`, `netfilter`, `steering`, `pins`, `port` or `lock`.
    pub part: String,
    /// Repairs since the agent started.
    pub repairs: u64,
}

/// How all parts are: written by `Upkeep::run`, read by `status` and metrics.
#[derive(Clone, Debug, Default)]
pub struct Conditions {
    parts: Arc<Mutex<BTreeMap<Part, Condition>>>,
    kernel: Arc<KernelView>,
}

impl Conditions {
    /// On a kernel like this, with nothing checked yet.
    pub fn on(kernel: KernelView) -> Self {
        Self {
            parts: Arc::default(),
            kernel: Arc::new(kernel),
        }
    }

    /// How programs are attached, and what the kernel lacks.
    pub fn kernel(&self) -> &KernelView {
        &self.kernel
    }

    /// State of `part`; the default (no repairs, no fault) before its first check.
    pub fn of(&self, part: Part) -> Condition {
        self.parts.lock().get(&part).cloned().unwrap_or_default()
    }

    /// Repairs of a part, for `status`.
    pub fn repairs(&self, part: Part) -> RepairsView {
        RepairsView {
            part: part.as_str().to_owned(),
            repairs: self.of(part).repairs,
        }
    }

    /// What is wrong now, in words.
    pub fn faults(&self) -> Vec<String> {
        let parts = self.parts.lock();
        let faults = parts.iter().filter_map(|(part, condition)| {
            let fault = condition.fault.as_ref()?;
            Some(format!("{}: {fault}", part.as_str()))
        });
        faults.collect()
    }

    /// Notes what another check found of a part; none = it is well.
    pub fn note(&self, part: Part, fault: Option<String>) {
        match fault {
            Some(fault) => self.is_broken(part, fault),
            None => self.is_well(part),
        }
    }

    /// Runs a check of a part. One that panics leaves the part broken, and the others go on.
    fn check(&self, part: Part, check: impl FnOnce()) {
        if catch_unwind(AssertUnwindSafe(check)).is_err() {
            let fault = "its check panicked; the log says where: please report it".to_owned();
            self.is_broken(part, fault);
        }
    }

    fn repaired(&self, part: Part, what: &str) {
        tracing::warn!(
            part = part.as_str(),
            what,
            "another program changed the datapath; repaired"
        );
        let mut parts = self.parts.lock();
        let condition = parts.entry(part).or_default();
        condition.repairs += 1;
        condition.fault = None;
    }

    fn is_well(&self, part: Part) {
        self.parts.lock().entry(part).or_default().fault = None;
    }

    fn is_broken(&self, part: Part, fault: String) {
        let mut parts = self.parts.lock();
        let condition = parts.entry(part).or_default();
        if condition.fault.as_ref() != Some(&fault) {
            tracing::error!(part = part.as_str(), fault, "cannot repair the datapath");
        }
        condition.fault = Some(fault);
    }
}

/// What is checked, with what it takes to repair it.
#[derive(Debug)]
pub struct Upkeep {
    node: Node,
    /// Maps held open, by name.
    pins: BTreeMap<&'static str, HeldPin>,
    port: Option<PortHold>,
    conditions: Conditions,
}

/// What `Upkeep` is made of.
#[derive(Debug)]
pub struct Node {
    /// Whether the node has IPv4.
    pub ipv4: bool,
    /// Whether the node has IPv6.
    pub ipv6: bool,
    pub globals: Globals,
    /// Group id of `--sdp-group`, which may open the pins.
    pub sdp_group: u32,
    /// Number of the steering program.
    pub steering: u32,
    /// Names of interfaces and bridges that are closed.
    pub closed: ClosedNames,
    /// The proxy port, if it is to be held.
    pub port: Option<u16>,
}

/// Returns when the agent's nftables tables change. Without a subscription it does not return.
async fn changed(tables: &mut Option<TableEvents>) {
    if let Some(events) = tables {
        match events.changed().await {
            Ok(()) => return,
            Err(error) => no_events(&error),
        }
        *tables = None;
    }
    std::future::pending().await
}

fn no_events(error: &io::Error) {
    tracing::warn!(%error, "cannot follow changes of nftables tables; they are checked every two seconds");
}

impl Upkeep {
    /// Binds the port and opens the maps. `conditions` receives the state of each part.
    pub fn new(node: Node, conditions: Conditions) -> Self {
        let mut upkeep = Self {
            port: node
                .port
                .map(|port| PortHold::new(port, node.ipv4, node.ipv6)),
            node,
            pins: BTreeMap::new(),
            conditions,
        };
        upkeep.check_pins();
        upkeep.check_port();
        upkeep
    }

    /// Checks and repairs until stopped; once every `interval`, or every two seconds, and when the
    /// agent's nftables tables change.
    pub async fn run(mut self, interval: Duration, stop: CancellationToken) {
        let mut ticker = tokio::time::interval(interval.clamp(Duration::from_millis(10), INTERVAL));
        ticker.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut tables = TableEvents::open(nftables::TABLE)
            .inspect_err(no_events)
            .ok();
        loop {
            let is_change = tokio::select! {
                _ = ticker.tick() => false,
                () = changed(&mut tables) => true,
                () = stop.cancelled() => return,
            };
            let conditions = self.conditions.clone();
            let checked = tokio::task::spawn_blocking(move || {
                self.check_all();
                self
            });
            match checked.await {
                Ok(upkeep) => self = upkeep,
                // The runtime ends.
                Err(error) => {
                    for part in Part::ALL {
                        conditions.is_broken(part, format!("is checked no more: {error}"));
                    }
                    return;
                }
            }
            if is_change {
                tokio::time::sleep(PAUSE).await;
            }
        }
    }

    fn check_all(&mut self) {
        let conditions = self.conditions.clone();
        // First the directories of all pins, then the maps: a program is loaded with the maps that
        // are pinned, and with new ones where none are.
        conditions.check(Part::Pins, || self.make_directories());
        conditions.check(Part::Pins, || self.check_pins());
        let runtime = tokio::runtime::Handle::current();
        conditions.check(Part::Routes, || runtime.block_on(self.check_routes()));
        conditions.check(Part::Netfilter, || self.check_netfilter());
        conditions.check(Part::Steering, || self.check_steering());
        conditions.check(Part::Port, || self.check_port());
    }

    async fn check_routes(&self) {
        let look = || routing::faults(self.node.ipv4, self.node.ipv6);
        let repair = async {
            let before = look().await?;
            if before.is_empty() {
                return Ok((before, Vec::new()));
            }
            routing::install(self.node.ipv4, self.node.ipv6).await?;
            Ok::<_, routing::RoutingError>((before, look().await?))
        };
        match repair.await {
            Ok((before, _)) if before.is_empty() => self.conditions.is_well(Part::Routes),
            Ok((before, left)) if left.is_empty() => {
                self.conditions.repaired(Part::Routes, &before.join("; "));
            }
            Ok((_, left)) => self.conditions.is_broken(Part::Routes, left.join("; ")),
            Err(error) => self.conditions.is_broken(Part::Routes, error.to_string()),
        }
    }

    fn check_netfilter(&self) {
        let repair = || {
            let mut repaired = None;
            for family in Family::ALL {
                let Some(missing) = nftables::check(family)? else {
                    continue;
                };
                nftables::install(family)?;
                if let Some(left) = nftables::check(family)? {
                    return Ok((repaired, Some(left)));
                }
                repaired = Some(missing.to_string());
            }
            repaired = self.node.closed.repair()?.or(repaired);
            Ok::<_, nftables::NftablesError>((repaired, None))
        };
        match repair() {
            Ok((None, None)) => self.conditions.is_well(Part::Netfilter),
            Ok((Some(missing), None)) => {
                self.conditions.repaired(Part::Netfilter, &missing);
            }
            Ok((_, Some(left))) => self.conditions.is_broken(Part::Netfilter, left.to_string()),
            Err(error) => self
                .conditions
                .is_broken(Part::Netfilter, error.to_string()),
        }
    }

    fn check_steering(&mut self) {
        let Some(fault) = steering_program::fault(&self.node.globals, self.node.steering) else {
            self.conditions.is_well(Part::Steering);
            return;
        };
        let maps = [redirect::NAME, steering::SLOTS_NAME, steering::SOCKS_NAME];
        let held = maps.iter().filter_map(|name| self.pins.get(name));
        let maps: Vec<u32> = held.map(HeldPin::id).collect();
        match steering_program::replace(&self.node.globals, &maps) {
            Ok(number) => {
                self.node.steering = number;
                self.conditions.repaired(Part::Steering, &fault);
            }
            Err(error) => self
                .conditions
                .is_broken(Part::Steering, format!("{fault}; {error}")),
        }
    }

    fn make_directories(&self) {
        let root = self.node.globals.root();
        let missing: Vec<_> = [pin::GLOBALS, pin::LINKS]
            .into_iter()
            .filter(|dir| !root.join(dir).is_dir())
            .collect();
        if missing.is_empty() {
            return;
        }
        match make_dirs(root) {
            Ok(()) => self
                .conditions
                .repaired(Part::Pins, &format!("directories {}", missing.join(", "))),
            Err(error) => self.conditions.is_broken(Part::Pins, error.to_string()),
        }
    }

    fn check_pins(&mut self) {
        let mut lost = Vec::new();
        let mut failed = Vec::new();
        for name in kernel::SHARED_PINS.into_iter().chain(tunnel::PINS) {
            let outcome = match self.pins.get(name) {
                Some(held) if held.is_pinned() => continue,
                Some(held) => held.pin_again().map(|()| lost.push(name)),
                // Made with the first endpoint's programs, or with a mode of the tunnel.
                None => HeldPin::open(&self.node.globals.path(name)).map(|opened| {
                    self.pins.extend(opened.map(|held| (name, held)));
                }),
            };
            if let Err(error) = outcome {
                failed.push(format!("{name}: {error}"));
            }
        }
        if !lost.is_empty()
            && let Err(error) = kernel::share(&self.node.globals, self.node.sdp_group)
        {
            failed.push(error.to_string());
        }
        match (failed.is_empty(), lost.is_empty()) {
            (false, _) => self.conditions.is_broken(Part::Pins, failed.join("; ")),
            (true, false) => self
                .conditions
                .repaired(Part::Pins, &format!("pins of {}", lost.join(", "))),
            (true, true) => self.conditions.is_well(Part::Pins),
        }
    }

    fn check_port(&mut self) {
        match self.port.as_mut().map_or(Ok(()), PortHold::take) {
            Ok(()) => self.conditions.is_well(Part::Port),
            Err(error) => self.conditions.is_broken(Part::Port, error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_that_panics_leaves_its_part_broken_until_it_succeeds() {
        let conditions = Conditions::default();
        conditions.check(Part::Routes, || conditions.is_well(Part::Routes));
        conditions.check(Part::Pins, || panic!("a check of the test"));
        conditions.check(Part::Port, || conditions.is_well(Part::Port));
        let faults = conditions.faults();
        assert_eq!(faults.len(), 1, "{faults:?}");
        assert!(
            faults[0].starts_with("pins: its check panicked"),
            "{faults:?}"
        );
        conditions.check(Part::Pins, || conditions.is_well(Part::Pins));
        assert_eq!(conditions.faults(), Vec::<String>::new());
    }
}
