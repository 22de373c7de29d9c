//! The only proxy of the node is killed while pod B sends its load. The agent has a built-in proxy
//! if the chart's values enable it.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde::Serialize;
use shared_maps::user::monotonic_ns;

use super::setup::Setup;
use crate::config;

/// How long the node is without the proxy.
const AWAY: Duration = Duration::from_millis(1500);
/// Queries sent up to this time before a kill may be lost with the proxy, nanoseconds.
const HAD: u64 = 500_000_000;
/// The kernel closes the sockets of a killed proxy within this time, nanoseconds.
const CLOSES: u64 = 500_000_000;

/// Pod B's results while the only proxy of its node is killed.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Killed {
    /// Number of times that the proxy was killed.
    pub times: usize,
    /// DNS queries of pod B.
    pub b_sent: u64,
    /// Queries of pod B without an answer.
    pub b_lost: u64,
    /// Lost queries that were not in flight at the killed proxy.
    pub b_lost_later: u64,
    /// Queries of pod B with a wrong answer.
    pub b_wrong: u64,
    /// Time from a kill until the last lost query was sent, milliseconds.
    pub last_lost_ms: u64,
    /// 99th percentile of the time to an answer, milliseconds.
    pub b_p99_ms: f64,
}

impl Killed {
    /// Losses of pod B, except queries that the killed proxy had in flight. `None` if there are
    /// none.
    pub fn losses(&self) -> Option<String> {
        (self.b_lost_later > 0 || self.b_wrong > 0).then(|| {
            format!(
                "only proxy killed: {} queries lost that were not in flight there, {} wrong",
                self.b_lost_later, self.b_wrong
            )
        })
    }
}

impl Setup {
    /// Kills the only proxy `times` times, and starts another one each time.
    pub fn the_only_proxy_is_killed(&mut self, times: usize) -> Result<Killed> {
        let builtin = !config::chart_value("disableBuiltinDnsProxy")?;
        self.replace_agent(builtin)?;
        let traffic = self.load_of_b()?;
        let mut kills = Vec::new();
        for _ in 0..times {
            traffic.flows(u64::from(self.size.udp_rate / 4))?;
            kills.push(monotonic_ns());
            self.kill_proxy()?;
            std::thread::sleep(AWAY);
            self.start_proxy()?;
        }
        traffic.flows(u64::from(self.size.udp_rate / 4))?;
        let total = traffic.finish()?.total();
        self.replace_agent(false)?;
        ensure!(total.right > 0, "B got no answer");
        let after = |sent: u64| {
            let mut kills = kills.iter().filter(|kill| sent + HAD >= **kill);
            kills.next_back().map(|kill| sent.saturating_sub(*kill))
        };
        let lost: Vec<_> = total.lost_at.iter().map(|sent| after(*sent)).collect();
        let later = lost
            .iter()
            .filter(|after| after.is_none_or(|ns| ns > CLOSES));
        Ok(Killed {
            times,
            b_sent: total.sent,
            b_lost: total.lost,
            b_lost_later: u64::try_from(later.count())?,
            b_wrong: total.wrong,
            last_lost_ms: lost.iter().flatten().max().unwrap_or(&0) / 1_000_000,
            b_p99_ms: total.percentile_ms(99),
        })
    }
}
