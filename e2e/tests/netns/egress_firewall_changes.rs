//! EgressFirewalls that change without pause, while packets flow: what the old and the new list
//! both deny never passes, and what both allow is never dropped.
use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::lab::{DNS4, UDP_PORT, at, web4};
use holdfast_e2e::policy::{NOTHING_ELSE, TO_DNS, cidr, firewall};
use holdfast_e2e::{AgentOptions, Lab, Programs, Query, with_lab};

const ROUNDS: usize = 40;
const PAUSE: Duration = Duration::from_millis(70);
const ALLOWED: u8 = 10;
const DENIED: u8 = 12;
/// Web server to which the denied name resolves.
const BAD: u8 = 13;

const BY_NAME: &[&str] = &[
    TO_DNS,
    "{type: Deny, to: {dnsName: bad.example.test}}",
    "{type: Allow, to: {dnsName: '*.example.test'}}",
    NOTHING_ELSE,
];
const BY_BLOCK: &[&str] = &[
    "{type: Deny, to: {cidrSelector: 203.0.113.12/32}}",
    "{type: Deny, to: {cidrSelector: 203.0.113.13/32}}",
    "{type: Allow, to: {cidrSelector: 203.0.113.0/28}}",
    TO_DNS,
    "{type: Deny, to: {cidrSelector: 203.0.0.0/8}}",
];

fn options() -> AgentOptions {
    AgentOptions::default()
        .flag("--dns-server=192.0.2.53")
        .flag("--pod-cidr=10.77.0.0/24")
}

fn labels(namespace: &str) -> String {
    format!("k8s:app=web,k8s:io.kubernetes.pod.namespace={namespace}")
}

/// What happens once in each round.
type Act<'a> = &'a mut dyn FnMut(usize) -> Result<()>;

/// Packets flow while `act` changes something again and again.
fn under_changes(lab: &Lab, what: &str, act: Act<'_>) -> Result<()> {
    let denied = [DENIED, BAD].map(|host| lab.a.datagrams(at(web4(host), UDP_PORT)));
    let allowed = lab.a.datagrams(at(web4(ALLOWED), UDP_PORT))?;
    let stream = lab.a.stream(at(web4(ALLOWED), 80))?;
    for round in 0..ROUNDS {
        act(round).with_context(|| format!("{what}: round {round}"))?;
        lab.a
            .expect_open(at(web4(ALLOWED), 80))
            .with_context(|| format!("{what}: round {round}"))?;
        std::thread::sleep(PAUSE);
    }
    stream.expect_alive().context(what.to_owned())?;
    let (sent, echoed) = allowed.finish();
    ensure!(
        sent > 1000 && sent - echoed < 5,
        "{what}: {echoed} of {sent} came back"
    );
    for datagrams in denied {
        let (sent, echoed) = datagrams?.finish();
        ensure!(
            sent > 1000 && echoed == 0,
            "{what}: {echoed} of {sent} passed"
        );
    }
    Ok(())
}

#[test]
fn changes_without_pause_open_nothing_and_cut_nothing() {
    with_lab(|lab| {
        let names: [(&str, IpAddr); 2] = [
            ("www.example.test", web4(ALLOWED)),
            ("bad.example.test", web4(BAD)),
        ];
        let both = |one: &[&str], two: &[&str]| firewall("one", one) + &firewall("two", two);
        let Programs { agent, sdp } = lab.start_with(&both(BY_NAME, BY_BLOCK), &options())?;
        let mut agent = Some(agent);
        lab.add_endpoint(&lab.a, &labels("one"))?;
        for (name, address) in names {
            lab.zone.set(name, &[address], 600);
            lab.a.ask(&Query::a(name, DNS4))?.expect(address)?;
        }
        lab.a.expect_open(at(web4(ALLOWED), 80))?;
        lab.a.expect_closed(at(web4(BAD), 80))?;

        under_changes(lab, "the list changes", &mut |round| {
            let one = if round % 2 == 0 { BY_BLOCK } else { BY_NAME };
            lab.write_policy("web.yaml", &both(one, BY_BLOCK))
        })?;
        under_changes(lab, "the pod changes its namespace", &mut |round| {
            let namespace = if round % 2 == 0 { "two" } else { "one" };
            lab.add_endpoint(&lab.a, &labels(namespace))?;
            Ok(())
        })?;
        under_changes(lab, "the document moves between files", &mut |round| {
            let files = ["web.yaml", "a.yaml"];
            let (from, to) = (files[round % 2], files[(round + 1) % 2]);
            std::fs::rename(lab.policy_dir().join(from), lab.policy_dir().join(to))?;
            Ok(())
        })?;
        under_changes(lab, "another policy is added and removed", &mut |round| {
            let all = holdfast_e2e::policy::egress("more", "web", &cidr("203.0.113.0/24"));
            match round % 2 {
                0 => lab.write_policy("more.yaml", &all),
                _ => lab.remove_policy("more.yaml"),
            }
        })?;
        under_changes(lab, "other namespaces name its addresses", &mut |round| {
            let rules = [
                "{type: Deny, to: {cidrSelector: 203.0.113.10/31}}",
                "{type: Allow, to: {cidrSelector: 203.0.113.12/31}}",
                "{type: Deny, to: {dnsName: www.example.test}}",
                "{type: Allow, to: {dnsName: bad.example.test}}",
            ];
            let some = &rules[..round % (rules.len() + 1)];
            match some {
                [] => lab.remove_policy("else.yaml").or(Ok(())),
                some => lab.write_policy("else.yaml", &firewall("else", some)),
            }
        })?;
        under_changes(lab, "the agent is killed", &mut |round| {
            let one = if round % 2 == 0 { BY_BLOCK } else { BY_NAME };
            lab.write_policy("web.yaml", &both(one, BY_BLOCK))?;
            if round % 8 == 3 {
                let running = agent.take().context("the agent")?;
                std::thread::sleep(Duration::from_millis(60));
                running.kill_9()?;
                agent = Some(lab.start_agent(&options())?);
            }
            Ok(())
        })?;
        drop(sdp);
        Ok(())
    });
}
