//! A full disk under the state directory. Everything in force stays, also across a restart. New
//! names and blocks wait, and `status` names the file.
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::lab::{DNS4, UDP_PORT, at, other4, web4};
use holdfast_e2e::policy::{cidr, dns, egress, good_names, names};
use holdfast_e2e::small_disk::SmallDisk;
use holdfast_e2e::{AgentOptions, Lab, Query, eventually, with_lab};

const SOON: Duration = Duration::from_secs(10);

/// Waits until `status` names the file, and says that there is no space.
fn says_full(lab: &Lab, file: &str) -> Result<()> {
    eventually(
        &format!("the full disk is reported, with {file}"),
        SOON,
        || {
            let status = lab.agent_json(&["status"])?;
            let problems = status.get("problems").context("problems")?.to_string();
            ensure!(problems.contains("No space left"), "{problems}");
            ensure!(problems.contains(file), "{problems}");
            Ok(())
        },
    )
}

#[test]
fn a_full_disk_delays_only_new_state_until_there_is_room() {
    with_lab(|lab| {
        let disk = SmallDisk::at(&lab.directory().join("state"))?;
        lab.zone.set("www.good.test", &[web4(10)], 600);
        lab.zone.set("new.good.test", &[web4(11)], 600);
        let programs = lab.start(&good_names())?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;
        let file = format!("{}/ep_config.json", lab.endpoint_id(&lab.a)?);
        let on_disk = |name: &str| -> Result<()> {
            eventually(&format!("{name} is on disk"), SOON, || {
                let path = lab.directory().join("state/state").join(&file);
                let text = std::fs::read_to_string(&path)?;
                ensure!(text.contains(name), "not yet");
                Ok(())
            })
        };
        on_disk("www.good.test")?;
        let identities = lab.identities()?;
        let stream = lab.a.stream(at(web4(10), 80))?;
        let kept = lab.a.datagrams(at(web4(10), UDP_PORT))?;
        let shut = lab.a.datagrams(at(web4(12), UDP_PORT))?;

        disk.fill()?;
        lab.a
            .ask(&Query::a("new.good.test", DNS4))?
            .expect(web4(11))?;
        lab.a.expect_open(at(web4(11), 80))?;
        says_full(lab, &file)?;
        // An identity that is not on disk is in no map, so the address stays closed.
        let rules = dns("*.good.test") + &names("*.good.test") + &cidr("198.51.100.10/32");
        lab.write_policy("web.yaml", &egress("good-names", "web", &rules))?;
        says_full(lab, "local_allocator_state.json")?;
        lab.a.expect_closed(at(other4(10), 80))?;

        programs.agent.kill_9()?;
        // Otherwise the next agent removes this file, which it cannot write, and writes others into its space.
        std::fs::remove_file(lab.directory().join("state/owner.json"))?;
        disk.fill()?;
        let agent = lab.start_agent(&AgentOptions::default())?;
        ensure!(
            agent.log().contains("free space in --state-dir"),
            "not logged"
        );
        says_full(lab, "local_allocator_state.json")?;
        let after = lab.identities()?;
        for (id, labels) in &identities {
            ensure!(after.get(id) == Some(labels), "{id} was {labels}");
        }
        lab.a.expect_open(at(web4(10), 80))?;
        lab.a.expect_closed(at(other4(10), 80))?;
        lab.connected("one")?;
        lab.audit_settled("good.test", SOON)?;
        lab.a.expect_open(at(web4(11), 80))?;

        disk.empty()?;
        eventually("the block opens", SOON, || {
            lab.a.expect_open(at(other4(10), 80))
        })?;
        on_disk("new.good.test")?;
        eventually("no problem is left", SOON, || {
            let status = lab.agent_json(&["status"])?;
            let problems = status.get("problems").context("problems")?.to_string();
            ensure!(problems == "[]", "{problems}");
            Ok(())
        })?;
        stream.expect_alive()?;
        let (sent, echoed) = kept.finish();
        ensure!(echoed == sent, "{echoed} of {sent} datagrams came back");
        let (_, echoed) = shut.finish();
        ensure!(echoed == 0, "a closed address answered");
        Ok(())
    });
}
