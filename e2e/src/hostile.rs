//! The hostile neighbour: pod A attacks while pod B on the same node continues to work.
//!
//! Pod B sends a steady DNS load, connects to each fresh name as soon as its answer arrives, and
//! keeps a connection open. The tests assert counts: B loses nothing during any attack of A. `cargo
//! xtask bench hostile` measures times.

mod attack;
mod away;
mod killed;
mod measure;
mod packets;
mod setup;

use std::time::Duration;

use serde::Serialize;

pub use self::attack::Attack;
pub use self::killed::Killed;
pub use self::measure::Quiet;
pub use self::setup::Setup;

/// Duration and size of each attack.
#[derive(Clone, Debug)]
pub struct Size {
    /// How long each attack is measured.
    pub lasts: Duration,
    /// Percentage of the full rates and numbers.
    pub percent: u32,
    /// UDP queries per second of pod B.
    pub udp_rate: u32,
    /// TCP connections per second of pod B, one query each.
    pub tcp_rate: u32,
    /// Fresh names per second that pod B queries and connects to.
    pub fresh_rate: u32,
}

impl Size {
    /// For CI: debug builds, and seconds for each attack.
    pub fn short() -> Self {
        Self {
            lasts: Duration::from_secs(3),
            percent: 40,
            udp_rate: 150,
            tcp_rate: 10,
            fresh_rate: 10,
        }
    }

    /// For the benchmark and the `hostile` tier.
    pub fn full() -> Self {
        Self {
            lasts: Duration::from_secs(10),
            percent: 100,
            udp_rate: 500,
            tcp_rate: 20,
            fresh_rate: 20,
        }
    }

    /// `whole` scaled by [`Size::percent`], at least 1.
    pub fn of(&self, whole: u32) -> u32 {
        (whole / 100 * self.percent).max(1)
    }
}

/// Pod B's results during one attack.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    /// Name of the attack ([`Attack::name`]).
    pub attack: String,
    /// DNS queries of pod B.
    pub b_sent: u64,
    /// Queries of pod B without an answer.
    pub b_lost: u64,
    /// Queries of pod B with a wrong answer.
    pub b_wrong: u64,
    /// Median time to an answer, milliseconds.
    pub b_p50_ms: f64,
    /// 99th percentile of the time to an answer, milliseconds.
    pub b_p99_ms: f64,
    /// The 99th percentile over UDP alone and over TCP alone, milliseconds.
    pub b_p99_ms_by_transport: [f64; 2],
    /// Fresh names that pod B queried and connected to.
    pub b_fresh: u64,
    /// Fresh names whose address did not accept the first SYN.
    pub b_not_open: u64,
    /// Fresh names whose answer took at least the response max delay.
    pub b_late: u64,
    /// Whether the connection that pod B had opened before still works.
    pub b_stream_alive: bool,
    /// Highest resident memory so far of proxy and agent, MiB.
    pub rss_mb: [u64; 2],
    /// How often the attack struck: packets, queries or connections.
    pub strikes: u64,
    /// Some of the errors, as text.
    pub samples: Vec<String>,
}

impl Row {
    /// Losses of pod B in words. `None` if it lost nothing.
    pub fn losses(&self) -> Option<String> {
        let mut losses = Vec::new();
        for (number, of) in [
            (self.b_lost, "queries without an answer"),
            (self.b_wrong, "queries with a wrong answer"),
            (self.b_not_open, "fresh names not open at once"),
            (self.b_late, "late releases"),
        ] {
            if number > 0 {
                losses.push(format!("{number} {of}"));
            }
        }
        if !self.b_stream_alive {
            losses.push("an open connection cut".to_owned());
        }
        (!losses.is_empty()).then(|| {
            format!(
                "{}: {} ({:?})",
                self.attack,
                losses.join(", "),
                self.samples
            )
        })
    }
}
