//! `status`: who has which steering slots on this node.

use std::path::Path;

use serde::{Deserialize, Serialize};
use shared_maps::{
    steering::{HEARTBEAT_DEAD_NS, KIND_FALLBACK, KIND_FREE, SLOTS_NAME, Slot},
    user::{Access, Globals, Map, MapKind, monotonic_ns},
};

/// One proxy of this node, from the steering maps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Replica {
    /// Process id in the PID namespace of the proxy.
    pub pid: u32,
    /// Whether this is the proxy that answers the request.
    pub is_this: bool,
    /// Whether it is an agent's built-in proxy, which serves when no other does.
    pub fallback: bool,
    /// Slots of the proxy, one per worker.
    pub slots: Vec<u32>,
    /// Age of the oldest heartbeat of its slots, milliseconds.
    pub silent_ms: u64,
    /// Whether new packets go to this proxy.
    pub live: bool,
}

/// Every owner of a slot; empty where there are no steering maps. `own`: the slots of this process.
pub(super) fn replicas(bpf_root: &Path, own: &[u32]) -> Vec<Replica> {
    let path = Globals::new(bpf_root).path(SLOTS_NAME);
    let Ok(slots) = Map::<u32, Slot>::open(&path, MapKind::Array, Access::ReadOnly) else {
        return Vec::new();
    };
    let all = (0..slots.max_entries()).filter_map(|number| {
        let slot = slots.get(&number).ok().flatten()?;
        Some((number, slot))
    });
    group(all, (own, std::process::id()), monotonic_ns())
}

/// Proxies in containers may all have process id 1, each in a PID namespace of its own. So the
/// process id alone does not tell which of them is this process.
fn group(
    slots: impl Iterator<Item = (u32, Slot)>,
    (own, this): (&[u32], u32),
    now: u64,
) -> Vec<Replica> {
    let mut replicas: Vec<Replica> = Vec::new();
    for (number, slot) in slots.filter(|(_, slot)| slot.kind != KIND_FREE) {
        let silent = now.saturating_sub(slot.heartbeat);
        let fallback = slot.kind == KIND_FALLBACK;
        let is_this = slot.owner == this && own.contains(&number);
        let same =
            |r: &&mut Replica| (r.pid, r.is_this, r.fallback) == (slot.owner, is_this, fallback);
        let silent_ms = silent / 1_000_000;
        let live = silent <= HEARTBEAT_DEAD_NS;
        match replicas.iter_mut().find(same) {
            Some(replica) => {
                replica.slots.push(number);
                replica.silent_ms = replica.silent_ms.max(silent_ms);
                replica.live &= live;
            }
            None => replicas.push(Replica {
                pid: slot.owner,
                is_this,
                fallback,
                slots: vec![number],
                silent_ms,
                live,
            }),
        }
    }
    replicas
}

impl Replica {
    /// The replica as one line for a terminal.
    pub(super) fn text(&self) -> String {
        let mut text = format!("pid {}, slots {:?}", self.pid, self.slots);
        if self.is_this {
            text.push_str(", this one");
        }
        if self.fallback {
            text.push_str(", an agent's built-in proxy");
        }
        if !self.live {
            text.push_str(&format!(", silent for {} ms: bypassed", self.silent_ms));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use shared_maps::steering::KIND_SDP;

    use super::*;

    #[test]
    fn slots_are_listed_by_owner() {
        let slot = |kind, owner, heartbeat| Slot {
            heartbeat,
            kind,
            owner,
            ..Slot::default()
        };
        let now = 10_000_000_000;
        let old = now - 2_000_000_000;
        let slots = [
            slot(KIND_SDP, 7, now),
            slot(KIND_SDP, 8, old),
            slot(KIND_FREE, 9, now),
            slot(KIND_SDP, 7, now - 1_000_000),
            slot(KIND_FALLBACK, 6, now),
        ];
        let replicas = group((0..).zip(slots), (&[0, 3], 7), now);
        let shown: Vec<_> = replicas.iter().map(Replica::text).collect();
        assert_eq!(
            shown,
            [
                "pid 7, slots [0, 3], this one",
                "pid 8, slots [1], silent for 2000 ms: bypassed",
                "pid 6, slots [4], an agent's built-in proxy",
            ]
        );
        assert_eq!(replicas.iter().map(|r| r.silent_ms).max(), Some(2000));
    }

    #[test]
    fn two_that_are_process_1_in_their_containers_are_two() {
        let slot = |heartbeat| Slot {
            heartbeat,
            kind: KIND_SDP,
            owner: 1,
            ..Slot::default()
        };
        let now = 10_000_000_000;
        let slots = [slot(now - 2_000_000_000), slot(now)];
        let replicas = group((0..).zip(slots), (&[1], 1), now);
        let shown: Vec<_> = replicas
            .iter()
            .map(|r| (&r.slots[..], r.is_this, r.live))
            .collect();
        let expected = [(&[0][..], false, false), (&[1][..], true, true)];
        assert_eq!(shown, expected);
    }
}
