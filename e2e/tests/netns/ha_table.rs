//! The five rows of CFP-30984's "Scenarios and expected behaviour".
use std::time::Duration;

use anyhow::Result;
use holdfast_e2e::lab::{DNS4, DNS6, at, web4};
use holdfast_e2e::policy::{WEB, good_names};
use holdfast_e2e::{AgentOptions, Lab, Query, SdpOptions, with_lab};

const LIMIT: Duration = Duration::from_secs(10);

#[test]
fn each_row_behaves_as_in_the_table() {
    with_lab(|lab| {
        for host in 10..15 {
            lab.zone
                .set(&format!("row{host}.good.test"), &[web4(host)], 600);
        }
        lab.write_policy("web.yaml", &good_names())?;

        // Agent running, built-in proxy disabled, SDP running.
        let agent = lab.start_agent(&AgentOptions::default())?;
        let sdp = lab.start_sdp(&SdpOptions::default())?;
        lab.add_endpoint(&lab.a, WEB)?;
        dns_works(lab, 10)?;

        // Agent running, built-in proxy disabled, SDP down: no DNS. Other traffic continues.
        sdp.terminate(LIMIT)?;
        for query in [
            Query::a("row10.good.test", DNS4),
            Query::a("row10.good.test", DNS6),
        ] {
            let query = query.within(Duration::from_millis(500));
            assert!(lab.a.ask(&query).is_err(), "answered with no proxy running");
            assert!(
                lab.a.ask(&query.tcp()).is_err(),
                "answered with no proxy running"
            );
        }
        lab.a.expect_open(at(web4(10), 80))?;
        lab.a.expect_closed(at(web4(11), 80))?;

        // Agent running with its built-in proxy, SDP down.
        agent.terminate(LIMIT)?;
        let agent = lab.start_agent(&AgentOptions::default().with_builtin())?;
        dns_works(lab, 11)?;

        // Agent, built-in proxy and SDP running.
        let sdp = lab.start_sdp(&SdpOptions::default())?;
        lab.connected("one")?;
        dns_works(lab, 12)?;

        // Agent down, SDP running: existing names and policy work.
        agent.kill_9()?;
        for host in 10..13 {
            let query = Query::a(&format!("row{host}.good.test"), DNS4);
            lab.a.ask(&query)?.expect(web4(host))?;
            lab.a.expect_open(at(web4(host), 80))?;
        }
        lab.a
            .ask(&Query::a("row13.good.test", DNS4))?
            .expect(web4(13))?;
        lab.a
            .ask(&Query::a("www.bad.test", DNS4))?
            .expect_refused()?;
        drop(sdp);
        Ok(())
    });
}

/// A fresh name is answered and opens, over UDP and TCP; others are refused.
fn dns_works(lab: &Lab, host: u8) -> Result<()> {
    let query = Query::a(&format!("row{host}.good.test"), DNS4);
    lab.a.ask(&query)?.expect(web4(host))?;
    lab.a.expect_open(at(web4(host), 80))?;
    lab.a.ask(&query.tcp())?.expect(web4(host))?;
    lab.a
        .ask(&Query::a("www.bad.test", DNS4))?
        .expect_refused()?;
    Ok(())
}
