//! An agent that hangs costs a query at most the response's maximal delay;
//! what was learned meanwhile opens when it goes on.
use std::time::Duration;

use anyhow::ensure;
use hickory_proto::op::ResponseCode;
use holdfast_e2e::lab::{DNS4, at, web4};
use holdfast_e2e::policy::good_names;
use holdfast_e2e::{Query, eventually, with_lab};
use nix::sys::signal::Signal;

#[test]
fn a_stopped_agent_stops_no_answer() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        lab.zone.set("new.good.test", &[web4(11)], 600);
        let programs = lab.start(&good_names())?;
        let known = Query::a("www.good.test", DNS4);
        lab.a.ask(&known)?.expect(web4(10))?;

        programs.agent.signal(Signal::SIGSTOP)?;
        for _ in 0..20 {
            lab.a.ask(&known)?.expect(web4(10))?;
        }
        lab.a.expect_open(at(web4(10), 80))?;
        lab.a
            .ask(&Query::a("new.good.test", DNS4))?
            .expect(web4(11))?;
        lab.a
            .ask(&Query::a("new.good.test", DNS4).tcp())?
            .expect(web4(11))?;
        lab.a
            .ask(&Query::a("www.bad.test", DNS4))?
            .expect_code(ResponseCode::Refused)?;
        lab.a.expect_closed(at(web4(11), 80))?;

        programs.agent.signal(Signal::SIGCONT)?;
        eventually(
            "what was learned meanwhile opens",
            Duration::from_secs(10),
            || lab.a.expect_open(at(web4(11), 80)),
        )?;
        let status = lab.sdp_json("one", &["status"])?;
        ensure!(status.is_object() || status.is_array(), "status: {status}");
        Ok(())
    });
}
