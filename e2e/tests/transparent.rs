//! Transparent mode: servers see the pod that asks, and answers find the proxy.
use std::collections::BTreeSet;

use anyhow::Result;
use holdfast_e2e::lab::{DNS4, DNS6, at, web4};
use holdfast_e2e::policy::{WEB, good_names};
use holdfast_e2e::{AgentOptions, Lab, Programs, Query, SdpOptions, with_lab};
use shared_maps::event::Reason;

const FLAG: &str = "--dnsproxy-enable-transparent-mode";
const FALLBACKS: &str = "holdfast_dns_transparent_fallbacks_total";
const SDP_METRICS: u16 = 9961;

/// Agent and proxy in transparent mode, pod a under the usual policy.
fn start(lab: &Lab) -> Result<Programs> {
    lab.write_policy("web.yaml", &good_names())?;
    let agent = lab.start_agent(&AgentOptions::default().flag(FLAG))?;
    let sdp = lab.start_sdp(&SdpOptions::default().flag(FLAG))?;
    lab.add_endpoint(&lab.a, WEB)?;
    Ok(Programs { agent, sdp })
}

#[test]
fn servers_outside_see_the_pod() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 60);
        let _programs = start(lab)?;
        for (server, pod) in [(DNS4, lab.a.v4.into()), (DNS6, lab.a.v6.into())] {
            for tcp in [false, true] {
                let query = Query::a("www.good.test", server);
                let query = if tcp { query.tcp() } else { query };
                for _ in 0..20 {
                    lab.a.ask(&query)?.expect(web4(10))?;
                }
                assert_eq!(lab.dns.take_askers(), BTreeSet::from([pod]), "tcp: {tcp}");
            }
        }
        lab.a.expect_open(at(web4(10), 80))?;
        assert!(lab.counted(Reason::Returned)? >= 80);
        assert_eq!(lab.counted(Reason::ForgedAnswer)?, 0);
        assert_eq!(lab.metric(SDP_METRICS, FALLBACKS, "")?, 0.0);
        Ok(())
    });
}
