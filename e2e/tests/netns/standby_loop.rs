//! Owners that die one after the other: the fourth takeover within ten minutes waits, and `status` and the metrics say so.
//! A takeover relies on the owner before for the places of endpoints only if that one has looked for them.
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::lab::{at, web4};
use holdfast_e2e::process::Program;
use holdfast_e2e::standby::{
    BRAKES, LOOKS_FIRST, edit_owner_file, expect_as_before, expect_owner, has_looked, owner_file,
    owner_of_a_name, standing_by,
};
use holdfast_e2e::{AgentOptions, Lab, eventually, with_lab};
use serde_json::Value;

const SOON: Duration = Duration::from_secs(15);

fn options() -> AgentOptions {
    AgentOptions::default().flag("--standby")
}

/// Kills the owner beside a new standby, and returns the next owner.
fn killed(lab: &Lab, owner: Program, name: &str) -> Result<Program> {
    let standby = standing_by(lab, name, &options())?;
    owner.kill_9()?;
    expect_owner(lab, &standby)?;
    expect_as_before(lab)?;
    Ok(standby)
}

fn with_owner(test: impl FnOnce(&Lab, Program, Program) -> Result<()>) {
    with_lab(|lab| {
        let (owner, proxy) = owner_of_a_name(lab, &options())?;
        test(lab, owner, proxy)
    });
}

#[test]
fn the_fourth_takeover_from_an_owner_that_died_waits() {
    with_owner(|lab, mut owner, _proxy| {
        for number in 1..=3 {
            owner = killed(lab, owner, &format!("standby{number}"))?;
            ensure!(!owner.log().contains(BRAKES), "{}", owner.log());
        }
        let standby = standing_by(lab, "standby4", &options())?;
        owner.kill_9()?;
        eventually("it waits", SOON, || {
            ensure!(standby.log().contains(BRAKES), "{}", standby.log());
            Ok(())
        })?;
        // The policy in force stays meanwhile.
        lab.a.expect_closed(at(web4(12), 80))?;
        lab.a.expect_open(at(web4(10), 80))?;
        expect_owner(lab, &standby)?;
        // In a loop, it relies on nothing that the owner before said.
        ensure!(standby.log().contains(LOOKS_FIRST), "{}", standby.log());
        let status = lab.agent_json(&["status"])?;
        let owner = status.pointer("/owner").context("no owner")?;
        for (field, number) in [("takeovers", 4), ("recent_takeovers", 4)] {
            ensure!(owner.get(field) == Some(&number.into()), "{owner}");
        }
        lab.status_has(SOON, &["4 in 10 minutes from owners that died"])?;
        let recent = lab.metric(9962, "holdfast_takeovers_recent", "")?;
        ensure!(recent == 4.0, "{recent} recent takeovers");
        let died = lab.metric(9962, "holdfast_takeovers_total", "end=\"died\"")?;
        ensure!(died == 4.0, "{died} takeovers");
        // The end of an owner that is asked to end is no part of the loop.
        let next = standing_by(lab, "next", &options())?;
        ensure!(standby.terminate(SOON)?.success());
        expect_owner(lab, &next)?;
        ensure!(!next.log().contains(BRAKES), "{}", next.log());
        Ok(())
    });
}

#[test]
fn a_takeover_looks_first_if_the_owner_before_had_not_looked() {
    with_owner(|lab, owner, _proxy| {
        let second = killed(lab, owner, "second")?;
        ensure!(!second.log().contains(LOOKS_FIRST), "{}", second.log());
        has_looked(lab)?;
        // As if the second one were killed a moment earlier.
        edit_owner_file(lab, |file| file["run"]["looked"] = false.into())?;
        let third = killed(lab, second, "third")?;
        ensure!(third.log().contains(LOOKS_FIRST), "{}", third.log());
        has_looked(lab)?;
        // The file is of another boot.
        edit_owner_file(lab, |file| file["run"]["boot_id"] = "another".into())?;
        let fourth = killed(lab, third, "fourth")?;
        ensure!(fourth.log().contains(LOOKS_FIRST), "{}", fourth.log());
        has_looked(lab)?;
        let boot = owner_file(lab)?.pointer("/run/boot_id").cloned();
        ensure!(boot != Some(Value::from("another")), "{boot:?}");
        Ok(())
    });
}

#[test]
fn a_standby_that_waits_can_be_ended_and_the_next_agent_starts() {
    with_owner(|lab, mut owner, _proxy| {
        for number in 1..=3 {
            owner = killed(lab, owner, &format!("standby{number}"))?;
        }
        // Ten more takeovers, so that the next one waits for the longest time.
        edit_owner_file(lab, |file| {
            let newest = &mut file["takeovers"]["newest"];
            let all = newest.as_array().cloned().unwrap_or_default();
            *newest = all.iter().cycle().take(13).cloned().collect();
        })?;
        let standby = standing_by(lab, "standby4", &options())?;
        owner.kill_9()?;
        eventually("it waits", SOON, || {
            let error = lab.agent(&["status"]).err().context("an owner answers")?;
            let text = format!("{error:#}");
            ensure!(text.contains("The standby takes over at"), "{text}");
            Ok(())
        })?;
        lab.a.expect_closed(at(web4(12), 80))?;
        ensure!(standby.terminate(SOON)?.success());
        let next = lab.start_agent(&options())?;
        expect_owner(lab, &next)
    });
}
