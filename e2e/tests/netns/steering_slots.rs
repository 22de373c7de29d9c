//! Ownership of slots: a sleeping replica loses its slot to another, and finds a new one.
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::lab::{DNS4, web4};
use holdfast_e2e::policy::{WEB, good_names};
use holdfast_e2e::{Lab, Query, SdpOptions, eventually, until, with_lab};
use nix::sys::signal::Signal;
use shared_maps::steering::{HEARTBEAT_DEAD_NS, SLOTS_NAME, Slot};
use shared_maps::user::{Access, Map, MapKind, monotonic_ns};

const SOON: Duration = Duration::from_secs(10);

fn replica(number: u16) -> SdpOptions {
    SdpOptions::new(&format!("r{number}"), 9970 + number).flag("--workers=1")
}

fn slots_of(lab: &Lab, name: &str) -> Result<Vec<u64>> {
    let status = lab.sdp_json(name, &["status"])?;
    let slots = status.pointer("/steering/slots");
    let slots = slots.and_then(|s| s.as_array()).context("no slots")?;
    Ok(slots.iter().filter_map(serde_json::Value::as_u64).collect())
}

fn slot(lab: &Lab, number: u32) -> Result<Slot> {
    let map = Map::<u32, Slot>::open(&lab.pin(SLOTS_NAME), MapKind::Array, Access::ReadOnly)?;
    map.get(&number)?.context("no such slot")
}

fn silent_ns(slot: &Slot) -> u64 {
    monotonic_ns().saturating_sub(slot.heartbeat)
}

#[test]
fn a_slot_taken_from_a_sleeping_replica_stays_taken_when_it_wakes() {
    with_lab(|lab| {
        let _agent = lab.start_agent(&Default::default())?;
        lab.add_endpoint(&lab.a, WEB)?;
        lab.write_policy("web.yaml", &good_names())?;
        lab.zone.set("www.good.test", &[web4(10)], 600);
        let sleeper = lab.start_sdp(&replica(0))?;
        let first = slots_of(lab, "r0")?;
        ensure!(first == [0], "not the first free slot: {first:?}");
        lab.connected("r0")?;
        sleeper.signal(Signal::SIGSTOP)?;
        let silent = || Ok(silent_ns(&slot(lab, 0)?));
        until("its slot may be taken", SOON, silent, |silent| {
            *silent > 3 * HEARTBEAT_DEAD_NS
        })?;
        let taker = lab.start_sdp(&replica(1))?;
        ensure!(slots_of(lab, "r1")? == [0], "the silent slot was not taken");
        lab.connected("r1")?;
        sleeper.signal(Signal::SIGCONT)?;
        eventually("the sleeper has a slot again", SOON, || {
            let own = slots_of(lab, "r0")?;
            ensure!(own.len() == 1 && own != [0], "slots {own:?}");
            Ok(())
        })?;
        let taken = slot(lab, 0)?;
        ensure!(taken.owner == taker.id(), "slot 0 is {taken:?}");
        ensure!(silent_ns(&taken) < HEARTBEAT_DEAD_NS, "slot 0 is silent");
        // Either slot leads to its own sockets: with 64 ports both replicas receive queries, and
        // answer.
        for _ in 0..64 {
            let answer = lab.a.ask(&Query::a("www.good.test", DNS4))?;
            answer.expect(web4(10))?;
        }
        for metrics in [9970, 9971] {
            let asked = lab.metric(metrics, "holdfast_dns_queries_total", "")?;
            ensure!(asked > 0.0, "the replica at {metrics} was not asked");
        }
        Ok(())
    });
}
