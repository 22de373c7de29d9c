//! Two standalone proxies and the agent's built-in proxy share the port. The built-in proxy gets
//! queries only when no standalone proxy is live, and a dead replica gets no queries.
use std::time::Duration;

use anyhow::{Result, ensure};
use holdfast_e2e::lab::{DNS4, web4};
use holdfast_e2e::load::Load;
use holdfast_e2e::node::AGENT_METRICS;
use holdfast_e2e::policy::{WEB, good_names};
use holdfast_e2e::{AgentOptions, Lab, Query, SdpOptions, eventually, with_lab};
use nix::sys::signal::Signal;

#[test]
fn replicas_share_and_replace_one_another() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        lab.write_policy("web.yaml", &good_names())?;
        let _agent = lab.start_agent(&AgentOptions::default().with_builtin())?;
        lab.add_endpoint(&lab.a, WEB)?;
        all_answered(lab, 50)?;
        ensure!(
            served(lab, AGENT_METRICS)? >= 50.0,
            "the built-in proxy did not count them"
        );

        let one = lab.start_sdp(&SdpOptions::new("one", 9971))?;
        let two = lab.start_sdp(&SdpOptions::new("two", 9972))?;
        // The built-in proxy gets no query while a replica is live.
        eventually(
            "the replicas answer everything",
            Duration::from_secs(20),
            || {
                let before = served(lab, 9971)? + served(lab, 9972)?;
                all_answered(lab, 200)?;
                let own = served(lab, 9971)? + served(lab, 9972)? - before;
                ensure!(own == 200.0, "the replicas answered {own} of 200");
                Ok(())
            },
        )?;
        for port in [9971, 9972] {
            assert!(
                served(lab, port)? > 0.0,
                "the replica on {port} received no query"
            );
        }

        // A drained replica loses nothing.
        let load = Load::start(&lab.a, &Query::a("www.good.test", DNS4), web4(10), 4)?;
        load.flows(100)?;
        two.terminate(Duration::from_secs(15))?;
        load.flows(100)?;
        load.finish()?;
        lab.audit_settled("good.test", Duration::from_secs(5))?;

        // A killed replica gets no queries once its heartbeat is old.
        let two = lab.start_sdp(&SdpOptions::new("two", 9972))?;
        one.kill_9()?;
        let short = Query::a("www.good.test", DNS4).within(Duration::from_millis(200));
        eventually(
            "only live replicas get packets",
            Duration::from_secs(5),
            || {
                for _ in 0..30 {
                    lab.a.ask(&short)?.expect(web4(10))?;
                }
                Ok(())
            },
        )?;
        all_answered(lab, 100)?;

        // A hanging replica gets no queries, either, until it continues.
        let one = lab.start_sdp(&SdpOptions::new("one", 9971))?;
        one.signal(Signal::SIGSTOP)?;
        eventually(
            "a hanging replica gets no packets",
            Duration::from_secs(5),
            || {
                for _ in 0..30 {
                    lab.a.ask(&short)?.expect(web4(10))?;
                }
                Ok(())
            },
        )?;
        one.signal(Signal::SIGCONT)?;
        two.terminate(Duration::from_secs(15))?;
        eventually(
            "the replica takes part again",
            Duration::from_secs(5),
            || {
                let before = served(lab, 9971)?;
                all_answered(lab, 50)?;
                let own = served(lab, 9971)? - before;
                ensure!(own == 50.0, "it answered {own} of 50");
                Ok(())
            },
        )?;

        // When the last replica has ended, the built-in proxy takes over.
        one.terminate(Duration::from_secs(15))?;
        all_answered(lab, 100)?;
        lab.audit_settled("good.test", Duration::from_secs(5))
    });
}

/// Sends each query from a fresh source port, so that all slots get their share.
fn all_answered(lab: &Lab, count: u32) -> Result<()> {
    let query = Query::a("www.good.test", DNS4);
    for i in 0..count {
        lab.a
            .ask(&if i % 10 == 0 {
                query.clone().tcp()
            } else {
                query.clone()
            })?
            .expect(web4(10))?;
    }
    Ok(())
}

fn served(lab: &Lab, port: u16) -> Result<f64> {
    lab.metric(port, "holdfast_dns_queries_total", "")
}
