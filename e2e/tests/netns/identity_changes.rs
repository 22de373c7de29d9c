//! An address changes its identity under traffic, and no packet is lost. Policy maps have the new
//! identity before the ipcache has it, and keep the old one until the ipcache no longer has it.
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::lab::{DNS4, UDP_PORT, at, web4};
use holdfast_e2e::policy::{cidr, egress, good_names, names};
use holdfast_e2e::{AgentOptions, Lab, Query, until, with_lab};
use shared_maps::event::Reason;

const SOON: Duration = Duration::from_secs(10);
const CHANGES: u8 = 6;

fn identity(lab: &Lab) -> Result<u64> {
    let all = lab.ipcache()?;
    all.get(&web4(10)).copied().context("it has no entry")
}

/// Waits for another identity than `before`.
fn changed(lab: &Lab, before: u64) -> Result<u64> {
    until(
        "another identity",
        SOON,
        || identity(lab),
        |now| *now != before,
    )
}

#[test]
fn no_packet_is_lost_while_an_identity_changes() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        for n in 0..CHANGES {
            lab.zone.set(&format!("n{n}.good.test"), &[web4(10)], 600);
        }
        let _programs = lab.start(&good_names())?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;
        let stream = lab.a.stream(at(web4(10), 80))?;
        let datagrams = lab.a.datagrams(at(web4(10), UDP_PORT))?;
        let dropped = lab.counted(Reason::PolicyDenied)?;
        let mut now = identity(lab)?;
        // Each name has a selector of its own, so each answer adds a label.
        let each: String = (0..CHANGES)
            .map(|n| names(&format!("n{n}.good.test")))
            .collect();
        lab.write_policy("each.yaml", &egress("each", "web", &each))?;
        let selectors = || lab.agent(&["selectors", "list"]);
        until("the agent has the selectors", SOON, selectors, |text| {
            text.contains("n0.good.test")
        })?;
        for n in 0..CHANGES {
            lab.a
                .ask(&Query::a(&format!("n{n}.good.test"), DNS4))?
                .expect(web4(10))?;
            now = changed(lab, now)?;
        }
        // A block's label is added, and all selectors of one document are removed at once.
        lab.write_policy(
            "block.yaml",
            &egress("block", "web", &cidr("203.0.113.0/24")),
        )?;
        now = changed(lab, now)?;
        lab.remove_policy("each.yaml")?;
        now = changed(lab, now)?;
        lab.remove_policy("block.yaml")?;
        changed(lab, now)?;
        let (sent, echoed) = datagrams.finish();
        ensure!(sent > 50, "{sent} sent");
        ensure!(sent == echoed, "{sent} sent, {echoed} came back");
        stream.expect_alive()?;
        assert_eq!(lab.counted(Reason::PolicyDenied)?, dropped);
        Ok(())
    });
}

/// The limit of `--tofqdns-max-identities` (docs/src/identities.md): no open address closes, and a
/// shared address opens nothing more.
#[test]
fn the_circuit_breaker_closes_nothing_and_is_reported() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        lab.zone.set("both.good.test", &[web4(10)], 600);
        lab.zone.set("alone.good.test", &[web4(11)], 600);
        // The selectors' own identities do not count.
        let options = AgentOptions::default().flag("--tofqdns-max-identities=0");
        let second = "- toFQDNs: [{matchName: both.good.test}]\n  toPorts: [{ports: [{port: \"8080\", protocol: TCP}]}]\n";
        lab.write_policy("second.yaml", &egress("second", "web", second))?;
        let _programs = lab.start_with(&good_names(), &options)?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;
        let stream = lab.a.stream(at(web4(10), 80))?;
        let before = identity(lab)?;
        lab.a
            .ask(&Query::a("both.good.test", DNS4))?
            .expect(web4(10))?;
        ensure!(identity(lab)? == before, "it has another identity");
        stream.expect_alive()?;
        lab.a.expect_open(at(web4(10), 80))?;
        lab.a.expect_closed(at(web4(10), 8080))?;
        lab.a
            .ask(&Query::a("alone.good.test", DNS4))?
            .expect(web4(11))?;
        lab.a.expect_open(at(web4(11), 80))?;
        let text = lab.agent(&["status"])?;
        ensure!(text.contains("circuit breaker: 1 addresses"), "{text}");
        let metric = |name: &str| lab.metric(9962, name, "");
        assert_eq!(metric("holdfast_identity_limited_addresses")?, 1.0);
        assert_eq!(metric("holdfast_identity_limited_total")?, 1.0);
        assert_eq!(metric("holdfast_identity_fqdn")?, 4.0);
        assert_eq!(metric("holdfast_identity_fqdn_combinations")?, 0.0);
        // With one selector less, no address is limited.
        lab.remove_policy("second.yaml")?;
        let limited = || metric("holdfast_identity_limited_addresses");
        until("no address is limited", SOON, limited, |now| *now == 0.0)?;
        stream.expect_alive()
    });
}
