//! Full maps: entries in force stay. A change without room is refused as a whole, reported, and
//! tried again.
use std::time::Duration;

use anyhow::{Result, ensure};
use holdfast_e2e::lab::{DNS4, at, web4};
use holdfast_e2e::policy::{WEB, dns, egress, good_names, names};
use holdfast_e2e::{AgentOptions, Lab, Query, eventually, until, with_lab};

const SOON: Duration = Duration::from_secs(15);

fn problems(lab: &Lab) -> Result<String> {
    lab.agent(&["status"])
}

#[test]
fn an_address_without_room_is_answered_and_stays_closed_until_there_is() {
    with_lab(|lab| {
        lab.zone.set("first.good.test", &[web4(10)], 600);
        lab.zone.set("last.good.test", &[web4(11)], 600);
        let crowd: Vec<_> = (0..80).map(|n| [198, 18, 0, n].into()).collect();
        for (n, some) in crowd.chunks(20).enumerate() {
            lab.zone.set(&format!("crowd{n}.good.test"), some, 600);
        }
        let options = AgentOptions::default().flag("--bpf-ipcache-map-max=64");
        let _programs = lab.start_with(&good_names(), &options)?;
        lab.a
            .ask(&Query::a("first.good.test", DNS4))?
            .expect(web4(10))?;
        let stream = lab.a.stream(at(web4(10), 80))?;
        for n in 0..4 {
            lab.a.ask(&Query::a(&format!("crowd{n}.good.test"), DNS4))?;
        }
        // The answer is held for a limited time, its address stays closed, and both are reported.
        lab.a
            .ask(&Query::a("last.good.test", DNS4))?
            .expect(web4(11))?;
        lab.a.expect_closed(at(web4(11), 80))?;
        stream.expect_alive()?;
        lab.a.expect_open(at(web4(10), 80))?;
        let text = problems(lab)?;
        ensure!(text.contains("ipcache is full"), "{text}");
        let refused = lab.metric(
            9962,
            "holdfast_fqdn_mappings_total",
            "outcome=\"not_realised\"",
        )?;
        ensure!(refused >= 1.0, "{refused} mappings were not realised");
        // After there is room, the waiting entries are written without another event.
        lab.agent(&[
            "fqdn",
            "cache",
            "clean",
            "--matchpattern",
            "crowd*.good.test",
        ])?;
        eventually("there is room", SOON, || {
            lab.a.expect_open(at(web4(11), 80))
        })?;
        until(
            "no problem of the map",
            SOON,
            || problems(lab),
            |text| !text.contains("ipcache"),
        )?;
        stream.expect_alive()?;
        lab.audit_settled("last.good.test", SOON)
    });
}

#[test]
fn an_agent_counts_by_the_size_that_the_map_was_made_with() {
    with_lab(|lab| {
        for flag in ["--bpf-ipcache-map-max=64", "--bpf-ipcache-map-max=4096"] {
            let _agent = lab.start_agent(&AgentOptions::default().flag(flag))?;
            let max = lab.metric(9962, "holdfast_ipcache_max_entries", "")?;
            ensure!(max == 64.0, "{flag}: {max}");
        }
        Ok(())
    });
}

#[test]
fn a_policy_without_room_leaves_the_old_one_in_force() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        lab.zone.set("www.new.test", &[web4(11)], 600);
        let options = AgentOptions::default().flag("--bpf-policy-map-max=256");
        let _programs = lab.start_with(&good_names(), &options)?;
        let (good, new) = (
            Query::a("www.good.test", DNS4),
            Query::a("www.new.test", DNS4),
        );
        lab.a.ask(&good)?.expect(web4(10))?;
        let stream = lab.a.stream(at(web4(10), 80))?;
        let before = lab.bpf_json(&["policy", "list", &lab.endpoint_id(&lab.a)?.to_string()])?;

        let blocks: Vec<_> = (0..300)
            .map(|n| format!("198.{}.{}.0/24", 18 + n / 256, n % 256))
            .collect();
        let large = dns("*.new.test")
            + &names("*.new.test")
            + &format!("- toCIDR: [{}]\n", blocks.join(", "));
        lab.write_policy("large.yaml", &egress("large", "web", &large))?;
        until(
            "the full map is a problem",
            SOON,
            || problems(lab),
            |text| text.contains("map entries"),
        )?;
        let after = lab.bpf_json(&["policy", "list", &lab.endpoint_id(&lab.a)?.to_string()])?;
        ensure!(before == after, "{before} became {after}");
        stream.expect_alive()?;
        lab.a.ask(&good)?.expect(web4(10))?;
        lab.a.expect_open(at(web4(10), 80))?;

        // Half of the policy fits.
        let small = dns("*.new.test")
            + &names("*.new.test")
            + &format!("- toCIDR: [{}]\n", blocks[..100].join(", "));
        lab.write_policy("large.yaml", &egress("large", "web", &small))?;
        eventually("the smaller one is in force", SOON, || {
            lab.a.ask(&new)?.expect(web4(11))?;
            lab.a.expect_open(at(web4(11), 80))
        })?;
        until(
            "no problem of the map",
            SOON,
            || problems(lab),
            |text| !text.contains("map entries"),
        )?;
        stream.expect_alive()
    });
}

/// Entries of the node and pod a.
fn entries(lab: &Lab) -> Result<usize> {
    Ok(lab
        .bpf_json(&["lxc", "list"])?
        .as_array()
        .map_or(0, Vec::len))
}

#[test]
fn an_endpoint_without_room_is_closed_and_others_go_on() {
    let mut taken = 0;
    with_lab(|lab| {
        let _programs = lab.start(&good_names())?;
        taken = entries(lab)?;
        Ok(())
    });
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        let options = AgentOptions::default().flag(&format!("--bpf-lxc-map-max={taken}"));
        let _programs = lab.start_with(&good_names(), &options)?;
        assert_eq!(entries(lab)?, taken);
        lab.b.expect_open(at(web4(10), 80))?;
        let error = lab.add_endpoint(&lab.b, WEB).expect_err("there is no room");
        lab.b.expect_closed(at(web4(10), 80))?;
        ensure!(format!("{error:#}").contains("cilium_lxc"), "{error:#}");
        let text = problems(lab)?;
        ensure!(text.contains("cilium_lxc"), "{text}");
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;
        lab.a.expect_open(at(web4(10), 80))
    });
}
