//! Queries that are in flight at the server during an action on a proxy.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};

use super::setup::{LEAVES, Setup};
use crate::dns::probe::Query;
use crate::dns::zone::Manner;
use crate::wait::until;

/// Delay of the server's answers.
const LATE: Duration = Duration::from_millis(700);
/// The answer to each of these queries.
const ANSWER: IpAddr = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 17));

/// Runs `act` when the server has a query of each pod over each transport and family, and passes
/// `act` the number of these queries. Each query must be answered.
pub(super) fn with_slow_queries<T>(
    setup: &Setup,
    round: u32,
    act: impl FnOnce(u64) -> Result<T>,
) -> Result<T> {
    let zone = &setup.lab.zone;
    let mut queries = Vec::new();
    for (number, pod) in setup.clients().enumerate() {
        for server in setup.servers().slow {
            // Each query has its own name, because a proxy sends equal questions to the server only
            // once.
            let name = |transport: &str| {
                let family = if server.is_ipv4() { 4 } else { 6 };
                format!("slow{family}-{transport}-{number}-{round}.good.test")
            };
            for (name, tcp) in [(name("udp"), false), (name("tcp"), true)] {
                zone.set(&name, &[ANSWER], 600);
                zone.manner(&name, Manner::Delay(LATE));
                let query = Query::a(&name, server).within(LEAVES);
                queries.push((pod, name, if tcp { query.tcp() } else { query }));
            }
        }
    }
    std::thread::scope(|scope| {
        let asked: Vec<_> = queries
            .iter()
            .map(|(pod, _, query)| scope.spawn(|| pod.ask(query)?.expect(ANSWER)))
            .collect();
        let missing = || {
            let names = queries.iter().map(|(_, name, _)| name);
            Ok(names.filter(|name| zone.asked(name) == 0).count())
        };
        until(
            "the server lacks no slow query",
            LEAVES,
            missing,
            |missing| *missing == 0,
        )?;
        let done = act(queries.len() as u64);
        for (thread, (_, _, query)) in asked.into_iter().zip(&queries) {
            let answered = thread.join().map_err(|_| anyhow!("a query panicked"))?;
            answered.with_context(|| format!("in flight when a proxy was replaced: {query:?}"))?;
        }
        done
    })
}
