//! An agent that is killed and started again changes no identity and breaks no stream. Addresses
//! that were learned without it open when it is back.
use std::time::Duration;

use anyhow::ensure;
use holdfast_e2e::lab::{DNS4, UDP_PORT, at, web4, web6};
use holdfast_e2e::policy::{CLIENT, WEB, dns, egress, good_names, names};
use holdfast_e2e::{AgentOptions, Query, SdpOptions, eventually, with_lab};
use nix::sys::signal::Signal;
use shared_maps::event::Reason;

#[test]
fn a_restart_changes_no_identity_and_cuts_no_stream() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10), web6(10)], 600);
        lab.zone.set("later.good.test", &[web4(11)], 600);
        let programs = lab.start(&good_names())?;
        lab.add_endpoint(&lab.b, CLIENT)?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;
        lab.a
            .ask(&Query::aaaa("www.good.test", DNS4))?
            .expect(web6(10))?;
        let streams = [
            lab.a.stream(at(web4(10), 80))?,
            lab.a.stream(at(web6(10), 80))?,
        ];
        let unmanaged = lab.b.stream(at(web4(12), 8080))?;
        let identities = lab.identities()?;
        let endpoint = lab.endpoint_id(&lab.a)?;
        let kept = lab.a.datagrams(at(web4(10), UDP_PORT))?;
        let shut = lab.a.datagrams(at(web4(12), UDP_PORT))?;

        programs.agent.kill_9()?;
        lab.a.expect_open(at(web4(10), 80))?;
        lab.a.expect_closed(at(web4(11), 80))?;
        lab.a
            .ask(&Query::a("later.good.test", DNS4))?
            .expect(web4(11))?;

        let agent = lab.start_agent(&AgentOptions::default())?;
        assert_eq!(lab.identities()?, identities, "identities changed");
        assert_eq!(
            lab.endpoint_id(&lab.a)?,
            endpoint,
            "the endpoint's number changed"
        );
        for stream in &streams {
            stream.expect_alive()?;
        }
        lab.a.expect_open(at(web4(10), 80))?;
        lab.a.expect_open(at(web6(10), 80))?;
        lab.audit_settled("good.test", Duration::from_secs(2))?;
        lab.a.expect_open(at(web4(11), 80))?;

        // A terminated agent leaves everything in force as well.
        agent.terminate(Duration::from_secs(10))?;
        lab.a.expect_open(at(web4(10), 80))?;
        lab.a.expect_closed(at(web4(12), 80))?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        assert_eq!(lab.identities()?, identities, "identities changed");
        for stream in streams.iter().chain([&unmanaged]) {
            stream.expect_alive()?;
        }
        let (sent, echoed) = kept.finish();
        assert_eq!(echoed, sent, "datagrams to an open address were lost");
        let (_, echoed) = shut.finish();
        assert_eq!(echoed, 0, "a closed address answered");
        assert_eq!(lab.web.visits(at(web4(12), UDP_PORT)), 0);
        Ok(())
    });
}

/// A name is cleaned while a proxy is disconnected. The proxy's mapping of it opens nothing at the
/// next agent. Only a new lookup opens it.
#[test]
fn a_cleaned_name_stays_closed_until_it_is_looked_up_again() {
    with_lab(|lab| {
        for (name, web) in [("old.good.test", web4(10)), ("other.good.test", web4(11))] {
            lab.zone.set(name, &[web], 600);
        }
        let programs = lab.start(&good_names())?;
        for (name, web) in [("old.good.test", web4(10)), ("other.good.test", web4(11))] {
            lab.a.ask(&Query::a(name, DNS4))?.expect(web)?;
        }
        programs.sdp.signal(Signal::SIGSTOP)?;
        let clean = ["fqdn", "cache", "clean", "--matchpattern", "old.*.test"];
        let said = lab.agent(&clean)?;
        ensure!(said.contains("forgot 1 of 2"), "{said}");
        programs.agent.kill_9()?;
        lab.a.expect_open(at(web4(10), 80))?;
        programs.sdp.signal(Signal::SIGCONT)?;
        // The proxy may have received the revocation, or may report the name again.
        let grace = AgentOptions::default().flag("--identity-restore-grace-period=1s");
        let _agent = lab.start_agent(&grace)?;
        lab.connected("one")?;
        eventually("it closes", Duration::from_secs(10), || {
            lab.a.expect_closed(at(web4(10), 80))
        })?;
        let listed = lab.agent(&["fqdn", "cache", "list"])?;
        ensure!(!listed.contains("old.good.test"), "{listed}");
        lab.a.expect_open(at(web4(11), 80))?;
        lab.a
            .ask(&Query::a("old.good.test", DNS4))?
            .expect(web4(10))?;
        lab.a.expect_open(at(web4(10), 80))
    });
}

/// A lease ends with the process that holds it, whatever the answer's TTL is. While a proxy hangs,
/// the command says which addresses stay open, until when, and because of which proxy.
#[test]
fn a_cleaned_name_closes_although_its_proxy_died() {
    with_lab(|lab| {
        lab.zone.set("day.good.test", &[web4(10)], 86_400);
        let learn = || {
            lab.a
                .ask(&Query::a("day.good.test", DNS4))?
                .expect(web4(10))?;
            lab.a.expect_open(at(web4(10), 80))
        };
        let closes = || {
            eventually("it closes", Duration::from_secs(10), || {
                lab.a.expect_closed(at(web4(10), 80))
            })
        };
        let clean = ["fqdn", "cache", "clean"];
        let programs = lab.start(&good_names())?;
        learn()?;
        programs.sdp.signal(Signal::SIGSTOP)?;
        let said = lab.agent_json(&clean)?;
        let message = said.pointer("/message").and_then(|m| m.as_str());
        let message = message.unwrap_or_default();
        for part in ["forgot 1 of 1", "1 of them stay open, until 2", "proxy one"] {
            ensure!(message.contains(part), "{said}");
        }
        let open = said.pointer("/still_open/0/address");
        ensure!(open == Some(&web4(10).to_string().into()), "{said}");
        lab.a.expect_open(at(web4(10), 80))?;
        programs.sdp.kill_9()?;
        closes()?;

        let sdp = lab.start_sdp(&SdpOptions::default())?;
        lab.connected("one")?;
        learn()?;
        sdp.kill_9()?;
        let said = lab.agent(&clean)?;
        ensure!(said.contains("forgot 1 of 1"), "{said}");
        closes()?;
        let said = lab.agent(&clean)?;
        ensure!(!said.contains("stay open"), "{said}");
        Ok(())
    });
}

/// Programs are replaced in place and outlive the agent. No packet of a flood passes in between.
#[test]
fn a_pod_is_never_without_its_programs() {
    with_lab(|lab| {
        let rules = dns("*.good.test") + &names("*.good.test");
        lab.write_policy("client.yaml", &egress("client", "client", &rules))?;
        let programs = lab.start(&good_names())?;
        let closed = [web4(12), web6(12)].map(|web| at(web, UDP_PORT));
        let before = lab.counted(Reason::PolicyDenied)?;
        let floods = [lab.a.flood(closed[0])?, lab.a.flood(closed[1])?];

        programs.agent.kill_9()?;
        let agent = lab.start_agent(&AgentOptions::default())?;
        // Other labels give another identity, which is written into new programs.
        for labels in [CLIENT, WEB, CLIENT] {
            lab.add_endpoint(&lab.a, labels)?;
        }
        agent.terminate(Duration::from_secs(10))?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        lab.endpoint_id(&lab.a)?;

        let sent: u64 = floods.map(holdfast_e2e::pod::Flood::finish).iter().sum();
        assert!(sent > 1000, "{sent} datagrams are no flood");
        for closed in closed {
            assert_eq!(lab.web.visits(closed), 0, "{closed} was reached");
        }
        eventually("all were denied", Duration::from_secs(5), || {
            let denied = lab.counted(Reason::PolicyDenied)? - before;
            ensure!(denied >= sent, "{sent} sent, {denied} denied by a program");
            Ok(())
        })
    });
}
