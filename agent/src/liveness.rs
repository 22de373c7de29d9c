//! Which learned addresses still have connections, by the conntrack maps.

use std::{net::IpAddr, time::Duration};

use holdfast_sdp::mapping::BootTime;
use shared_maps::{
    conntrack::{
        CtKey4, CtKey6, CtValue, DIR_IN, NAME_ANY4, NAME_ANY6, NAME_TCP4, NAME_TCP6, RELATED,
        SERVICE,
    },
    user::{Access, Globals, Map, MapError, MapKind, Record, monotonic_ns},
};
use tokio_util::sync::CancellationToken;

use crate::{core::event::Event, runner::CoreHandle};

/// A key of either family.
trait Tuple: Record + Eq + std::hash::Hash {
    /// (endpoint, remote) of a connection that leaves an endpoint.
    fn leaving(&self) -> Option<(IpAddr, IpAddr)>;
}

impl Tuple for CtKey4 {
    fn leaving(&self) -> Option<(IpAddr, IpAddr)> {
        let (daddr, saddr) = (self.daddr, self.saddr);
        leaves(self.flags).then(|| (daddr.into(), saddr.into()))
    }
}

impl Tuple for CtKey6 {
    fn leaving(&self) -> Option<(IpAddr, IpAddr)> {
        let (daddr, saddr) = (self.daddr, self.saddr);
        leaves(self.flags).then(|| (daddr.into(), saddr.into()))
    }
}

const fn leaves(flags: u8) -> bool {
    flags & (DIR_IN | RELATED | SERVICE) == 0
}

/// Looks every `interval` until stopped.
pub async fn run(maps: Globals, core: CoreHandle, interval: Duration, stop: CancellationToken) {
    let mut ticker = tokio::time::interval(interval);
    ticker.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticker.tick() => {}
            () = stop.cancelled() => return,
        }
        let maps = maps.clone();
        // The maps hold up to 1.5 million entries: a walk blocks for seconds.
        let Ok(event) = tokio::task::spawn_blocking(move || look(&maps)).await else {
            return;
        };
        if core.tell(event).await.is_err() {
            return;
        }
    }
}

fn look(maps: &Globals) -> Event {
    let gc_start = BootTime::now();
    let now = monotonic_ns() / 1_000_000_000;
    let mut alive = Vec::new();
    let mut complete = true;
    let reads = [
        read::<CtKey4>(maps, NAME_TCP4, now, &mut alive),
        read::<CtKey4>(maps, NAME_ANY4, now, &mut alive),
        read::<CtKey6>(maps, NAME_TCP6, now, &mut alive),
        read::<CtKey6>(maps, NAME_ANY6, now, &mut alive),
    ];
    for read in reads {
        match read {
            Ok(whole) => complete &= whole,
            Err(error) => {
                tracing::warn!(%error, "conntrack was not read; no expired address goes until it is");
                complete = false;
            }
        }
    }
    alive.sort_unstable();
    alive.dedup();
    Event::Liveness {
        gc_start,
        alive,
        complete,
    }
}

/// Says whether the walk reached the end.
fn read<K: Tuple>(
    maps: &Globals,
    name: &str,
    now: u64,
    alive: &mut Vec<(IpAddr, IpAddr)>,
) -> Result<bool, MapError> {
    let map: Map<K, CtValue> = Map::open(&maps.path(name), MapKind::LruHash, Access::ReadOnly)?;
    let entries = map.entries()?;
    alive.extend(
        entries
            .found
            .iter()
            .filter(|(_, value)| u64::from(value.lifetime) > now)
            .filter_map(|(key, _)| key.leaving()),
    );
    Ok(entries.complete)
}

#[cfg(test)]
mod tests {
    use shared_maps::conntrack::DIR_OUT;

    use super::*;

    #[test]
    fn only_what_leaves_an_endpoint_counts() {
        let mut key = CtKey4 {
            daddr: [10, 0, 0, 1],
            saddr: [192, 0, 2, 1],
            flags: DIR_OUT,
            ..CtKey4::default()
        };
        let pod = IpAddr::from([10, 0, 0, 1]);
        assert_eq!(key.leaving(), Some((pod, IpAddr::from([192, 0, 2, 1]))));
        key.flags = DIR_IN;
        assert_eq!(key.leaving(), None);
        key.flags = DIR_OUT | RELATED;
        assert_eq!(key.leaving(), None);
    }
}
