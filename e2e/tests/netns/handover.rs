//! `holdfast-agent handover`: the agent that stands by takes over if it can read what the owner has written. Otherwise the
//! owner goes on.
use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::lab::{at, web4};
use holdfast_e2e::process::Program;
use holdfast_e2e::standby::{
    LOOKS_FIRST, TAKING_OVER, expect_as_before, expect_owner, owner_of_a_name, standing_by,
};
use holdfast_e2e::{AgentOptions, Lab, with_lab};

const SOON: Duration = Duration::from_secs(15);

/// As units have it: an upgrade may change settings.
fn options() -> AgentOptions {
    AgentOptions::default().flag("--standby=other")
}

fn with_owner(test: impl FnOnce(&Lab, Program, Program) -> Result<()>) {
    with_lab(|lab| {
        let (owner, proxy) = owner_of_a_name(lab, &options())?;
        test(lab, owner, proxy)
    });
}

/// Waits for an error with each of these parts. The owner goes on.
fn expect_refused(lab: &Lab, owner: &Program, parts: &[&str]) -> Result<()> {
    let error = lab.agent(&["handover"]).err().context("it is well")?;
    let text = format!("{error:#}");
    for part in parts {
        ensure!(text.contains(part), "no {part:?} in {text}");
    }
    expect_owner(lab, owner)?;
    expect_as_before(lab)
}

#[test]
fn the_standby_takes_over_on_request_and_the_owner_ends_well() {
    with_owner(|lab, mut owner, _proxy| {
        expect_refused(lab, &owner, &["no agent answers on", "run --standby"])?;
        let standby = standing_by(lab, "standby", &options())?;
        let stream = lab.a.stream(at(web4(10), 80))?;
        let text = lab.agent(&["handover"])?;
        ensure!(
            text.contains(&format!(
                "pid {}, owns this node and is ready",
                standby.id()
            )),
            "{text}"
        );
        ensure!(owner.wait(SOON)?.success(), "it ended badly");
        expect_owner(lab, &standby)?;
        ensure!(!standby.log().contains(LOOKS_FIRST), "{}", standby.log());
        lab.status_has(SOON, &["which was asked to end after"])?;
        stream.expect_alive()?;
        expect_as_before(lab)
    });
}

#[test]
fn a_standby_that_cannot_read_the_state_does_not_take_over() {
    with_owner(|lab, owner, _proxy| {
        let standby = standing_by(lab, "standby", &options())?;
        let state = lab.directory().join("state/state");
        let endpoint = format!("{}/ep_config.json", lab.endpoint_id(&lab.a)?);
        for (file, text, says) in [
            ("epoch.json", r#"{"version":9}"#, "has version 9"),
            (&endpoint, "{", "it would lose files of the owner"),
        ] {
            let path = state.join(file);
            let before = fs::read(&path)?;
            fs::write(&path, text)?;
            let name = path.display().to_string();
            expect_refused(lab, &owner, &[says, &name])?;
            ensure!(!standby.log().contains(TAKING_OVER), "{}", standby.log());
            fs::write(&path, before)?;
        }
        let copy = format!("{}.standby.copy", lab.agent_socket().display());
        ensure!(!fs::exists(&copy)?, "{copy} is left behind");
        lab.agent(&["handover"])?;
        expect_owner(lab, &standby)?;
        expect_as_before(lab)
    });
}
