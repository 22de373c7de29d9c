//! Pods of the reference plugin `bridge`, with the bridge as gateway, are under the same policy as
//! routed pods, DNS names included.
use anyhow::{Context, Result, ensure};
use holdfast_e2e::cri::{Base, CriNode, PodName, Sent, allowed_server, describe};
use holdfast_e2e::lab::{DNS4, DNS6, at, web4, web6};
use holdfast_e2e::policy::{dns, egress, names};
use holdfast_e2e::{Query, SdpOptions, with_lab};

#[test]
fn names_and_addresses_are_judged_for_pods_of_a_bridge() {
    with_lab(|lab| {
        let node = CriNode::start(lab, Base::Bridge)?;
        let rules = dns("*.good.test") + &names("*.good.test") + &allowed_server();
        lab.write_policy("web.yaml", &egress("web", "web", &rules))?;
        lab.zone.set("www.good.test", &[web4(12), web6(12)], 60);
        lab.zone.set("www.bad.test", &[web4(13), web6(13)], 60);
        let pods = ["p", "q"].map(PodName::new);
        describe(lab, &pods)?;
        let sent = Sent::watch(lab)?;
        let _agent = node.start_agent(Base::Bridge.name())?;
        let _sdp = lab.start_sdp(&SdpOptions::default())?;
        for name in &pods {
            let sandbox = node.run(name)?;
            sent.expect_judged(sandbox.address())?;
            let pod = &sandbox.pod;
            for server in [DNS4, DNS6] {
                is_judged(&sandbox.pod, server).with_context(|| format!("by {server}"))?;
            }
            for address in [web4(12), web6(12)] {
                pod.expect_open(at(address, 80))?;
            }
            for address in [web4(13), web6(13)] {
                pod.expect_closed(at(address, 80))?;
            }
        }
        ensure!(
            lab.zone.asked("www.bad.test") == 0,
            "a refused name reached its server"
        );
        Ok(())
    });
}

/// Checks over UDP and TCP that an allowed name is answered and another name is refused.
fn is_judged(pod: &holdfast_e2e::Pod, server: std::net::IpAddr) -> Result<()> {
    for (name, allowed) in [("www.good.test", true), ("www.bad.test", false)] {
        for query in [Query::a(name, server), Query::a(name, server).tcp()] {
            let reply = pod.ask(&query)?;
            match allowed {
                true => reply.expect(web4(12)).map(drop)?,
                false => reply.expect_refused().map(drop)?,
            }
        }
        let reply = pod.ask(&Query::aaaa(name, server))?;
        match allowed {
            true => reply.expect(web6(12)).map(drop)?,
            false => reply.expect_refused().map(drop)?,
        }
    }
    Ok(())
}
