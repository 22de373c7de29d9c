//! `holdfast-sdp status` on live replicas: slot owners, the acknowledged revision, errors with
//! their counts, and the progress of a drain.
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::dns::zone::Manner;
use holdfast_e2e::lab::{DNS4, web4};
use holdfast_e2e::policy::good_names;
use holdfast_e2e::{AgentOptions, Lab, Query, SdpOptions, eventually, with_lab};
use nix::sys::signal::Signal;
use serde_json::Value;

const SOON: Duration = Duration::from_secs(10);

fn field(status: &Value, pointer: &str) -> Result<Value> {
    let found = status.pointer(pointer);
    found
        .cloned()
        .with_context(|| format!("{pointer} in {status}"))
}

fn of_one(lab: &Lab) -> Result<Value> {
    lab.sdp_json("one", &["status"])
}

/// Number of log lines about the lost agent.
fn lost(status: &Value) -> u64 {
    let troubles = status.get("troubles").and_then(Value::as_array);
    let mut about = troubles.into_iter().flatten().filter(|trouble| {
        let text = trouble.get("text").and_then(Value::as_str);
        text.is_some_and(|text| text.starts_with("connection to the agent lost"))
    });
    let count = about.try_fold(0, |sum, t| Some(sum + t.get("count")?.as_u64()?));
    count.unwrap_or(0)
}

#[test]
fn status_shows_replicas_agent_warnings_and_drain() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        lab.zone.manner("lost.good.test", Manner::Lost);
        let programs = lab.start(&good_names())?;
        let second = lab.start_sdp(&SdpOptions::new("two", 9971))?;
        lab.connected("one")?;

        let status = of_one(lab)?;
        ensure!(field(&status, "/steering/on")? == true, "{status}");
        let replicas = field(&status, "/replicas")?;
        let live = |pid: u32| {
            let mut all = replicas.as_array().into_iter().flatten();
            all.any(|r| r.get("pid") == Some(&pid.into()) && r.get("live") == Some(&true.into()))
        };
        ensure!(live(programs.sdp.id()) && live(second.id()), "{replicas}");
        let revision = field(&status, "/agent/rules/revision")?;
        ensure!(
            field(&status, "/agent/acked_revision")? == revision,
            "{status}"
        );
        ensure!(lost(&status) == 0, "{status}");

        let mut agent = programs.agent;
        for times in 1..=2 {
            agent.kill_9()?;
            eventually("the loss is noted", SOON, || {
                let status = of_one(lab)?;
                ensure!(field(&status, "/agent/connection")?.is_null(), "{status}");
                ensure!(
                    field(&status, "/agent/acked_revision")?.is_null(),
                    "{status}"
                );
                ensure!(lost(&status) == times, "{status}");
                Ok(())
            })?;
            agent = lab.start_agent(&AgentOptions::default())?;
            lab.connected("one")?;
        }
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;

        second.kill_9()?;
        let silent = Query::a("lost.good.test", DNS4).within(Duration::from_millis(300));
        ensure!(lab.a.ask(&silent).is_err(), "the server is not silent");
        ensure!(
            field(&of_one(lab)?, "/under_way/in_flight")? == 1,
            "not waited for"
        );
        programs.sdp.signal(Signal::SIGTERM)?;
        eventually("the drain is shown", SOON, || {
            let status = of_one(lab)?;
            ensure!(field(&status, "/drain/since_ms")?.is_u64(), "{status}");
            ensure!(field(&status, "/under_way/in_flight")? == 1, "{status}");
            ensure!(field(&status, "/steering/on")? == false, "{status}");
            Ok(())
        })
    });
}
