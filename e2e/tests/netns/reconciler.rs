//! Maps that another program changed: repaired within one run, and counted.
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::lab::{DNS4, at, web4, web6};
use holdfast_e2e::node::AGENT_METRICS;
use holdfast_e2e::policy::good_names;
use holdfast_e2e::{Lab, Query, eventually, with_lab};
use shared_maps::EndpointId;
use shared_maps::IdentityId;
use shared_maps::ipcache::{IpcacheKey, IpcacheValue};
use shared_maps::policy::{EGRESS, PolicyKey, PolicyValue};
use shared_maps::user::{Access, Globals};

const SOON: Duration = Duration::from_secs(10);

fn differences(lab: &Lab, part: &str) -> Result<f64> {
    let label = format!("part=\"{part}\"");
    lab.metric(
        AGENT_METRICS,
        "holdfast_reconcile_differences_total",
        &label,
    )
}

fn counts(lab: &Lab, part: &str, wanted: f64) -> Result<()> {
    eventually(&format!("{wanted} differences of {part}"), SOON, || {
        let found = differences(lab, part)?;
        ensure!(found == wanted, "{found}");
        Ok(())
    })
}

#[test]
fn entries_that_another_program_wrote_are_repaired_and_counted() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10), web6(10)], 600);
        let _programs = lab.start(&good_names())?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;
        lab.a.expect_open(at(web4(10), 80))?;
        let passes = |lab: &Lab| lab.metric(AGENT_METRICS, "holdfast_reconcile_passes_total", "");
        let before = passes(lab)?;
        eventually("passes go on", SOON, || {
            ensure!(passes(lab)? >= before + 2.0);
            Ok(())
        })?;
        for part in ["ipcache", "policy", "lxc", "names"] {
            ensure!(differences(lab, part)? == 0.0, "{part} was repaired");
        }
        lab.repairs.expect();

        let globals = Globals::new(lab.bpf_root());
        let ipcache = globals.ipcache(Access::ReadWrite)?;
        let open = IpcacheKey::v4([203, 0, 113, 10], 32);
        let closed = IpcacheKey::v4([203, 0, 113, 12], 32);
        let right = ipcache.get(&open)?.context("the address is not there")?;

        // A missing entry: an allowed address is closed.
        ensure!(ipcache.remove(&open)?, "not removed");
        counts(lab, "ipcache", 1.0)?;
        lab.a.expect_open(at(web4(10), 80))?;
        // A wrong entry.
        let world = IpcacheValue {
            sec_identity: IdentityId::WORLD_IPV4.0,
            ..right
        };
        ipcache.set(&open, &world)?;
        counts(lab, "ipcache", 2.0)?;
        lab.a.expect_open(at(web4(10), 80))?;
        // A superfluous entry: an address is open that is not allowed.
        ipcache.set(&closed, &right)?;
        counts(lab, "ipcache", 3.0)?;
        lab.a.expect_closed(at(web4(12), 80))?;

        let id = EndpointId(u16::try_from(lab.endpoint_id(&lab.a)?)?);
        let policy = globals.policy(id, Access::ReadWrite)?;
        let allowed = PolicyKey::new(right.sec_identity, EGRESS, 6, 80, 16);
        ensure!(policy.remove(&allowed)?, "no such entry: {allowed:?}");
        counts(lab, "policy", 1.0)?;
        lab.a.expect_open(at(web4(10), 80))?;
        let any = PolicyKey::new(0, EGRESS, 0, 0, 0);
        policy.set(&any, &PolicyValue::allow(any))?;
        counts(lab, "policy", 2.0)?;
        lab.a.expect_closed(at(web4(12), 80))?;

        let lxc = globals.lxc(Access::ReadWrite)?;
        let key = shared_maps::user::lxc_key(lab.a.v4.into());
        ensure!(lxc.remove(&key)?, "the pod is not there");
        counts(lab, "lxc", 1.0)?;
        lab.a
            .ask(&Query::aaaa("www.good.test", DNS4))?
            .expect(web6(10))?;
        let status = lab.agent(&["status"])?;
        ensure!(
            status.contains("repaired: 3 ipcache, 2 policy, 1 endpoint entries, 0 names"),
            "{status}"
        );
        ensure!(differences(lab, "names")? == 0.0, "names differ");
        Ok(())
    });
}
