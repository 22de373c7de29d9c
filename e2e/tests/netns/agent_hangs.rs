//! An agent that hangs delays a query by the response max delay at most. After three delayed
//! queries in a row, no query waits until the agent answers again.
use std::time::Duration;

use anyhow::{Result, ensure};
use holdfast_e2e::lab::{DNS4, at, web4};
use holdfast_e2e::policy::good_names;
use holdfast_e2e::{Lab, Query, eventually, with_lab};
use nix::sys::signal::Signal;
use serde_json::Value;

const SOON: Duration = Duration::from_secs(10);

fn late(lab: &Lab) -> Result<f64> {
    lab.metric(9961, "holdfast_dns_answers_total", "result=\"late\"")
}

#[test]
fn answers_do_not_wait_for_a_stopped_agent_and_are_reported_later() {
    with_lab(|lab| {
        for n in 10..18 {
            lab.zone.set(&format!("n{n}.good.test"), &[web4(n)], 600);
        }
        let programs = lab.start(&good_names())?;
        lab.a
            .ask(&Query::a("n10.good.test", DNS4))?
            .expect(web4(10))?;
        let before = late(lab)?;
        programs.agent.signal(Signal::SIGSTOP)?;
        for n in 11..17 {
            lab.a
                .ask(&Query::a(&format!("n{n}.good.test"), DNS4))?
                .expect(web4(n))?;
        }
        let status = lab.sdp_json("one", &["status"])?;
        ensure!(
            status.pointer("/mappings/agent_hung") == Some(&Value::Bool(true)),
            "does not count as hung: {status}"
        );
        lab.a
            .ask(&Query::a("n16.good.test", DNS4).tcp())?
            .expect(web4(16))?;
        lab.a
            .ask(&Query::a("www.bad.test", DNS4))?
            .expect_refused()?;
        lab.a.expect_open(at(web4(10), 80))?;
        lab.a.expect_closed(at(web4(11), 80))?;
        let waited = late(lab)? - before;
        // On a busy machine the fourth may arrive before the third's time is recorded.
        ensure!((3.0..=4.0).contains(&waited), "{waited} waited in vain");
        let past = lab.metric(9961, "holdfast_mapping_agent_hung_total", "")?;
        ensure!(
            waited + past == 7.0,
            "{waited} late, {past} released past it"
        );
        ensure!(lab.metric(9961, "holdfast_agent_hung", "")? == 1.0);
        let held = lab.metric(9961, "holdfast_mapping_held_total", "")?;
        lab.a
            .ask(&Query::a("n17.good.test", DNS4))?
            .expect(web4(17))?;
        ensure!(
            lab.metric(9961, "holdfast_mapping_held_total", "")? == held,
            "an answer was held for an agent that hangs"
        );

        let missing = lab.audit("good.test", &[9961])?;
        ensure!(missing == 7, "{missing} of 7 addresses are closed");

        programs.agent.signal(Signal::SIGCONT)?;
        for n in 11..17 {
            eventually("addresses learned during the hang open", SOON, || {
                lab.a.expect_open(at(web4(n), 80))
            })?;
        }
        eventually("the agent no longer counts as hung", SOON, || {
            let status = lab.sdp_json("one", &["status"])?;
            ensure!(status.pointer("/mappings/agent_hung") == Some(&Value::Bool(false)));
            Ok(())
        })?;
        lab.a
            .ask(&Query::a("n17.good.test", DNS4))?
            .expect(web4(17))?;
        lab.a.expect_open(at(web4(17), 80))?;
        lab.audit_settled("good.test", Duration::from_secs(2))
    });
}
