//! The promises R1 to R4 and R9 under load: acts on agent and proxies, and the outcome of every
//! query during an act. `cargo xtask bench ha` runs all acts at full size, the tests `ha_*` in a
//! short form.

mod agent;
mod calibration;
mod connections;
mod dropped;
mod failures;
mod in_flight;
mod replicas;
mod services;
mod setup;
mod start;
mod takeover;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde::Serialize;

pub use self::setup::{Redirect, Setup};
use self::takeover::{End, Next};
use crate::traffic::{Counts, Report};

/// Size of the load, and number of repetitions of each act.
#[derive(Clone, Debug)]
pub struct Size {
    /// UDP queries per second.
    pub udp_rate: u32,
    /// TCP connections per second with one query each.
    pub tcp_rate: u32,
    /// Lasting TCP connections per pod and server.
    pub lasting: u32,
    /// Shortest time of a run, so that it uses many source ports.
    pub at_least: Duration,
    /// Pause between two faults, and also before the first and after the last.
    pub pause: Duration,
    /// Number of replacements of a replica.
    pub rolls: u32,
    /// Number of kills, restarts and similar faults.
    pub faults: u32,
    /// Number of starts that are timed. The fastest one counts.
    pub starts: u32,
    /// Number of endpoints of a full node, in addition to the endpoints under load.
    pub endpoints: u8,
    /// Policies of a full node.
    pub policies: u8,
    /// Names that the pods of a full node have looked up.
    pub known: u16,
    /// Whether a row fails if it exceeds its promised times. Tests run debug builds, and other
    /// tests run beside them: their times say nothing.
    pub judges_times: bool,
    /// The previous version's proxy, if it is available.
    pub previous: Option<PathBuf>,
}

impl Size {
    /// For a test with debug builds: each act takes seconds.
    pub fn short() -> Self {
        Self {
            udp_rate: 600,
            tcp_rate: 40,
            lasting: 1,
            at_least: Duration::ZERO,
            pause: Duration::from_millis(400),
            rolls: 3,
            faults: 2,
            starts: 3,
            endpoints: 12,
            policies: 5,
            known: 50,
            judges_times: false,
            previous: None,
        }
    }

    /// For the benchmark: the load that the promises name.
    pub fn full() -> Self {
        Self {
            udp_rate: 5500,
            tcp_rate: 200,
            lasting: 2,
            at_least: Duration::from_secs(12),
            pause: Duration::from_millis(800),
            rolls: 10,
            faults: 5,
            starts: 5,
            endpoints: 230,
            policies: 20,
            known: 1000,
            judges_times: true,
            previous: None,
        }
    }
}

/// An act on the agent or on proxies, during which queries are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Nothing is done. The row shows the losses of the load itself.
    Calm,
    /// The load must detect this: no replica for a while, then refusals.
    Broken,
    /// Agent killed and started again.
    AgentKilled,
    /// Agent ended and started again, as an upgrade does.
    AgentRestarted,
    /// Agent killed on a full node while another agent stands by.
    OwnerKilled,
    /// Like [`Self::OwnerKilled`], without a second agent. The killed agent is started again at
    /// once.
    OwnerKilledAlone,
    /// Agent hangs on a full node while another agent stands by.
    OwnerHung,
    /// Agent killed while it starts, again and again.
    AgentCrashes,
    /// Agent restarted with and without its built-in proxy.
    BuiltinFlipped,
    /// Proxy started while the agent is down.
    ColdStart,
    /// One replica of two replaced, the new one first.
    Rolled,
    /// Like [`Self::Rolled`], while the agent is down. The new replicas start from files and pinned
    /// maps.
    RolledWithoutAgent,
    /// Like [`Self::Rolled`], between the previous version and this one.
    RolledVersions,
    /// The only replica ends and starts again beside a proxy without steering, such as Cilium's
    /// built-in one.
    RolledBesideOther,
    /// Replicas replaced on a node without steering maps.
    RolledWithoutMaps,
    /// One replica of two killed.
    Killed,
    /// One replica of two stopped.
    Stopped,
    /// The only replica killed, with the agent's built-in proxy as the chart has it by default.
    OnlyOneKilled,
    /// All pods behind a DNS Service and a web Service replaced on other nodes, while the agent is
    /// down. The new pods have other addresses. Then the agent starts again.
    BackendsReplaced,
}

/// One row of the table.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Names of the act and of the redirect.
    pub name: String,
    /// The promise that the act tests.
    pub promise: &'static str,
    pub sent: u64,
    /// Queries with a right answer.
    pub right: u64,
    /// Queries with a wrong answer.
    pub wrong: u64,
    /// Queries that got no answer.
    pub lost: u64,
    pub holds: bool,
    /// Figures of the act that have no column of their own.
    pub note: String,
    pub udp: Tally,
    pub tcp: Tally,
    /// Pairs of pod and UDP source port.
    pub source_ports: u64,
    /// Texts of some of the errors.
    pub samples: Vec<String>,
}

/// Outcome of the queries over one transport.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Tally {
    pub sent: u64,
    pub right: u64,
    pub wrong: u64,
    pub lost: u64,
    /// Lasting connections closed between two queries.
    pub reopened: u64,
    /// Queries that were on their way when such a connection closed.
    pub crossed: u64,
    /// Longest time to a right answer, milliseconds.
    pub slowest_ms: u64,
}

impl From<&Counts> for Tally {
    fn from(of: &Counts) -> Self {
        Self {
            sent: of.sent,
            right: of.right,
            wrong: of.wrong,
            lost: of.lost,
            reopened: of.reopened,
            crossed: of.crossed,
            slowest_ms: of.slowest_ms,
        }
    }
}

/// Promises of the design, in words.
const NONE_LOST: &str = "none lost, none wrong";
const SOON_AGAIN: &str = "none lost; open after the owner's end: names within 300 ms, new pods and policies within 500 ms";
const LOST_AT_ONCE: &str = "lost only its own queries, nothing sent later than 1 s after";
const LOST_IN_FLIGHT: &str = "lost only its own queries, nothing sent later than 500 ms after";
const COUNTED: &str = "the caused faults are counted as lost and as wrong";
const FIRST_ANSWER: &str = "first right answer within 250 ms of exec";

impl Row {
    /// A row with the promise that no query is lost.
    fn none_lost(name: String, report: &Report, note: String) -> Self {
        let total = report.total();
        let holds = total.lost == 0 && total.wrong == 0 && total.right > 0;
        Self::new(name, NONE_LOST, report, holds, note)
    }

    fn new(
        name: String,
        promise: &'static str,
        report: &Report,
        holds: bool,
        note: String,
    ) -> Self {
        let total = report.total();
        Self {
            name,
            promise,
            sent: total.sent,
            right: total.right,
            wrong: total.wrong,
            lost: total.lost,
            holds,
            note,
            udp: (&report.udp).into(),
            tcp: (&report.tcp).into(),
            source_ports: report.source_ports,
            samples: total.samples,
        }
    }
}

impl Act {
    /// Name of the act: its promise and a short description.
    pub fn name(self) -> &'static str {
        match self {
            Self::Calm => "nothing is done",
            Self::Broken => "calibration",
            Self::AgentKilled => "R1 agent killed",
            Self::AgentRestarted => "R1 agent restarted",
            Self::OwnerKilled => "R1 owner killed beside a standby",
            Self::OwnerKilledAlone => "R1 owner killed, started again",
            Self::OwnerHung => "R1 owner hung beside a standby",
            Self::AgentCrashes => "R1 agent crash loop",
            Self::BuiltinFlipped => "R1 built-in proxy flipped",
            Self::ColdStart => "R2 start without agent",
            Self::Rolled => "R3 rolling replacement",
            Self::RolledWithoutAgent => "R3 rolling without agent",
            Self::RolledVersions => "R3 rolling, previous version",
            Self::RolledBesideOther => "R3 restart beside another proxy",
            Self::RolledWithoutMaps => "R3 rolling without steering maps",
            Self::Killed => "R4 replica killed",
            Self::Stopped => "R4 replica stopped",
            Self::OnlyOneKilled => "R4 only replica killed",
            Self::BackendsReplaced => "R9 backends replaced",
        }
    }

    /// Plays the act in a lab of its own.
    pub fn play(self, redirect: Redirect, size: &Size) -> Result<Vec<Row>> {
        let setup = Setup::new(redirect, size)?;
        let start = Instant::now();
        let played = match self {
            Self::Calm => replicas::calm(&setup),
            Self::Broken => calibration::broken(&setup),
            Self::AgentKilled => agent::killed(&setup),
            Self::AgentRestarted => agent::restarted(&setup),
            Self::OwnerKilled => takeover::taken(&setup, End::Killed, Next::Standby),
            Self::OwnerKilledAlone => takeover::taken(&setup, End::Killed, Next::Restart),
            Self::OwnerHung => takeover::taken(&setup, End::Hung, Next::Standby),
            Self::AgentCrashes => agent::crash_loop(&setup),
            Self::BuiltinFlipped => agent::flipped(&setup),
            Self::ColdStart => start::cold(&setup),
            Self::Rolled => replicas::rolled(&setup, None),
            Self::RolledWithoutAgent => replicas::without_agent(&setup),
            Self::RolledVersions => replicas::rolled_versions(&setup),
            Self::RolledBesideOther => replicas::beside_other(&setup),
            Self::RolledWithoutMaps => replicas::without_maps(&setup),
            Self::Killed => failures::killed(&setup),
            Self::Stopped => failures::stopped(&setup),
            Self::OnlyOneKilled => failures::only_one_killed(&setup),
            Self::BackendsReplaced => services::replaced(&setup),
        };
        if played
            .as_ref()
            .map_or(true, |rows| rows.iter().any(|row| !row.holds))
        {
            setup.lab.print_logs();
        }
        let mut rows = played.with_context(|| {
            let counters = dropped::by_the_kernel(&setup);
            counters.unwrap_or_else(|error| error.to_string())
        })?;
        for row in &mut rows {
            if !row.holds {
                row.note += &format!("; {}", dropped::by_the_kernel(&setup)?);
            }
        }
        let name = format!("{}, {}", self.name(), redirect.name());
        for row in &mut rows {
            row.name = match row.name.as_str() {
                "" => name.clone(),
                part => format!("{name}: {part}"),
            };
        }
        eprintln!("{name}: {:.0} s", start.elapsed().as_secs_f32());
        Ok(rows)
    }
}
