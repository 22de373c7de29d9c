//! Which learned addresses still have connections, by the conntrack maps.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use agent_core::core::event::Event;
use agent_datapath::conntrack;
use dns_policy::boot_time::BootTime;
use shared_maps::user::{Globals, monotonic_ns};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::runner::CoreHandle;

/// The numbers of connections that a look finds count for three intervals, and for this long at least.
const VALID: Duration = Duration::from_secs(60);

/// Rest after a look: this long, or [`REST`] times as long as the look took, whichever is longer. Only looks because
/// of a freed address wait for its end.
const SHORTEST_REST: Duration = Duration::from_millis(500);
/// With this factor, endpoints that are added and removed without end take at most a tenth of a processor.
const REST: u32 = 10;

/// Looks every `interval`, and when an address was `freed`, until stopped. Each look also removes the
/// connections of endpoints that are gone.
pub(crate) async fn run(
    maps: Globals,
    core: CoreHandle,
    interval: Duration,
    freed: Arc<Notify>,
    stop: CancellationToken,
) {
    let valid = interval.saturating_mul(3).max(VALID).as_secs();
    let valid = u32::try_from(valid).unwrap_or(u32::MAX);
    let mut ticker = tokio::time::interval(interval);
    ticker.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut rested = tokio::time::Instant::now();
    loop {
        let removal = async {
            tokio::time::sleep_until(rested).await;
            freed.notified().await;
        };
        tokio::select! {
            _ = ticker.tick() => {}
            () = removal => {}
            () = stop.cancelled() => return,
        }
        let begin = Instant::now();
        let maps = maps.clone();
        // The maps hold up to 1.5 million entries: a walk blocks for seconds.
        let Ok(event) = tokio::task::spawn_blocking(move || scan(&maps, valid)).await else {
            return;
        };
        rested = tokio::time::Instant::now() + (begin.elapsed() * REST).max(SHORTEST_REST);
        if core.send(event).await.is_err() {
            return;
        }
    }
}

fn scan(maps: &Globals, valid: u32) -> Event {
    let gc_start = BootTime::now();
    let now = monotonic_ns() / 1_000_000_000;
    // The programs count seconds in 32 bits as well.
    let now = u32::try_from(now).unwrap_or(u32::MAX);
    let found = conntrack::scan(maps, now, valid);
    Event::Liveness {
        gc_start,
        alive: found.alive,
        complete: found.complete,
    }
}
