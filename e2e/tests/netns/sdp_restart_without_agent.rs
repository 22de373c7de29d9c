//! A proxy that starts while the agent is dead serves every endpoint from files and maps, even one
//! that never sent a query.
use std::time::Duration;

use anyhow::{Context, ensure};
use holdfast_e2e::lab::{DNS4, DNS6, at, web4, web6};
use holdfast_e2e::policy::{CLIENT, dns, egress, good_names, names};
use holdfast_e2e::{Query, SdpOptions, with_lab};
use serde_json::json;

#[test]
fn a_proxy_starts_without_an_agent() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10), web6(10)], 600);
        lab.zone.set("www.client.test", &[web4(11)], 600);
        let client = egress(
            "client",
            "client",
            &(dns("*.client.test") + &names("*.client.test")),
        );
        lab.write_policy("client.yaml", &client)?;
        let programs = lab.start(&good_names())?;
        lab.add_endpoint(&lab.b, CLIENT)?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;

        programs.agent.kill_9()?;
        programs.sdp.terminate(Duration::from_secs(15))?;
        let _sdp = lab.start_sdp(&SdpOptions::new("two", 9971))?;
        let status = lab.sdp_json("two", &["status"])?;
        let agent = status.get("agent").context("agent")?;
        ensure!(
            agent.get("rules") == Some(&json!({"from": "disk", "endpoints": 2}))
                && agent.get("connection") == Some(&json!(null)),
            "{status}"
        );
        let (_, probed) = lab.http(9971, "/readyz")?;
        ensure!(probed.contains("from disk, of 2 endpoints"), "{probed}");
        for server in [DNS4, DNS6] {
            for tcp in [false, true] {
                let over = |query: Query| if tcp { query.tcp() } else { query };
                let good = over(Query::a("www.good.test", server));
                let client = over(Query::a("www.client.test", server));
                lab.a.ask(&good)?.expect(web4(10))?;
                lab.a.ask(&client)?.expect_refused()?;
                lab.b.ask(&client)?.expect(web4(11))?;
                lab.b.ask(&good)?.expect_refused()?;
            }
        }
        lab.a.expect_open(at(web4(10), 80))?;
        // Never looked up while the agent ran, so it stays closed without it.
        lab.b.expect_closed(at(web4(11), 80))?;
        Ok(())
    });
}
