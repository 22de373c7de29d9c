//! Maps that the proxies write: their slots. (The kernel shows only the shape of a sockmap.)
use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::policy::good_names;
use holdfast_e2e::{AgentOptions, Lab, SdpOptions, eventually, with_lab};
use serde_json::Value;
use shared_maps::user::monotonic_ns;

use super::dump::{dump, long, number, shape};

const SOON: Duration = Duration::from_secs(10);
const SDP: u32 = 1;
const FALLBACK: u32 = 2;

#[test]
fn slots_show_the_documented_bytes() {
    with_lab(|lab| {
        let agent = AgentOptions::default().with_builtin();
        lab.write_policy("web.yaml", &good_names())?;
        let _agent = lab.start_agent(&agent)?;
        shape(lab, "hf_steer_slots_v1", "array", 4, 24, 16, 0)?;
        shape(lab, "hf_steer_socks_v1", "sockmap", 4, 4, 64, 0)?;
        let sdp = lab.start_sdp(&SdpOptions::default().flag("--workers=2"))?;
        let pid = |status: Value| status.get("pid").and_then(Value::as_u64).context("pid");
        let pids = BTreeMap::from([
            (SDP, pid(lab.sdp_json("one", &["status"])?)?),
            (FALLBACK, pid(lab.agent_json(&["status"])?)?),
        ]);

        let slots = eventually("both kinds have slots", SOON, || {
            let slots = slots(lab)?;
            let kinds: Vec<u32> = slots.values().map(|slot| slot.kind).collect();
            ensure!(
                kinds.contains(&FALLBACK) && kinds.iter().filter(|kind| **kind == SDP).count() == 2,
                "{slots:?}"
            );
            Ok(slots)
        })?;
        let mut tcp = BTreeMap::new();
        for (number, slot) in &slots {
            let owner = pids
                .get(&slot.kind)
                .context("a kind that is not documented")?;
            ensure!(u64::from(slot.owner) == *owner, "slot {number}: {slot:?}");
            ensure!(slot.proxy_port == 10_094, "slot {number}: {slot:?}");
            // Bits 0 and 1 UDP, 2 and 3 TCP, IPv4 before IPv6.
            ensure!(
                slot.sockets & 0b11 == 0b11 && slot.sockets >> 4 == 0,
                "slot {number}: {slot:?}"
            );
            *tcp.entry(slot.kind).or_insert(0) |= slot.sockets >> 2;
        }
        ensure!(tcp.values().all(|bits| *bits == 0b11), "TCP: {slots:?}");

        // A proxy that ends clears its slots.
        sdp.terminate(Duration::from_secs(15))?;
        let left = self::slots(lab)?;
        ensure!(left.values().all(|slot| slot.kind == FALLBACK), "{left:?}");
        for (number, slot) in &slots {
            if slot.kind == SDP {
                let all = dump(lab, "hf_steer_slots_v1")?;
                ensure!(
                    all.get(&number.to_ne_bytes()[..]) == Some(&vec![0; 24]),
                    "slot {number}: {all:02x?}"
                );
            }
        }
        Ok(())
    });
}

#[derive(Debug)]
struct Slot {
    kind: u32,
    owner: u32,
    sockets: u32,
    proxy_port: u32,
}

/// Slots in use, each with a fresh heartbeat.
fn slots(lab: &Lab) -> Result<BTreeMap<u32, Slot>> {
    let all = dump(lab, "hf_steer_slots_v1")?;
    let now = monotonic_ns();
    ensure!(all.len() == 16, "{} slots", all.len());
    let mut found = BTreeMap::new();
    for (key, value) in all {
        ensure!(value.len() == 24, "{value:02x?}");
        let kind = number(&value, 8);
        if kind == 0 {
            continue;
        }
        let age = now.checked_sub(long(&value, 0));
        ensure!(
            age.is_some_and(|age| u128::from(age) < SOON.as_nanos()),
            "heartbeat {age:?} ago: {value:02x?}"
        );
        let slot = Slot {
            kind,
            owner: number(&value, 12),
            sockets: number(&value, 16),
            proxy_port: number(&value, 20),
        };
        found.insert(number(&key, 0), slot);
    }
    Ok(found)
}
