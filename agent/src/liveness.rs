//! Which learned addresses still have connections, by the conntrack maps.

use std::time::Duration;

use dns_policy::boot_time::BootTime;
use shared_maps::user::{Globals, monotonic_ns};
use tokio_util::sync::CancellationToken;

use crate::{core::event::Event, datapath::conntrack, runner::CoreHandle};

/// What endpoints hold counts for three looks, and for this long at least.
const VALID: Duration = Duration::from_secs(60);

/// Looks every `interval` until stopped.
pub(crate) async fn run(
    maps: Globals,
    core: CoreHandle,
    interval: Duration,
    stop: CancellationToken,
) {
    let valid = interval.saturating_mul(3).max(VALID).as_secs();
    let valid = u32::try_from(valid).unwrap_or(u32::MAX);
    let mut ticker = tokio::time::interval(interval);
    ticker.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticker.tick() => {}
            () = stop.cancelled() => return,
        }
        let maps = maps.clone();
        // The maps hold up to 1.5 million entries: a walk blocks for seconds.
        let Ok(event) = tokio::task::spawn_blocking(move || scan(&maps, valid)).await else {
            return;
        };
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
