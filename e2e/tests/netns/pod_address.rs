//! A pod whose addresses change keeps its number and the names that it looked up.
use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::lab::{DNS4, at, other4, web4};
use holdfast_e2e::policy::{WEB, good_names};
use holdfast_e2e::{AgentOptions, Lab, Pod, Query, eventually, with_lab};

const SOON: Duration = Duration::from_secs(20);

/// Names that the pod looks up, each with its address.
fn learned() -> Vec<(String, IpAddr)> {
    let hosts = [web4(10), web4(11), other4(10), other4(11), other4(12)];
    let hosts = hosts.into_iter().enumerate();
    hosts
        .map(|(n, host)| (format!("n{n}.good.test"), host))
        .collect()
}

/// Replaces the addresses of a routed pod, which end in `from`, by others.
fn readdress(lab: &Lab, pod: &Pod, from: u8, to: u8) -> Result<()> {
    let host = &pod.host_side;
    lab.node.batch(&format!(
        "route del 10.77.0.{from}/32 dev {host}\n\
         route del fd77::{from:x}/128 dev {host}\n\
         route replace 10.77.0.{to}/32 dev {host}\n\
         route replace fd77::{to:x}/128 dev {host}"
    ))?;
    pod.netns.batch(&format!(
        "address add 10.77.0.{to}/32 dev eth0\n\
         address add fd77::{to:x}/128 dev eth0 nodad\n\
         address del 10.77.0.{from}/32 dev eth0\n\
         address del fd77::{from:x}/128 dev eth0\n\
         route replace 10.77.0.1/32 dev eth0\n\
         route replace default via 10.77.0.1 dev eth0"
    ))?;
    pod.netns.settled()
}

/// Number of the endpoint with an address.
fn endpoint_at(lab: &Lab, address: &str) -> Result<u64> {
    eventually("the endpoint has its address", SOON, || {
        let list = lab.agent_json(&["endpoint", "list"])?;
        let mut all = list.as_array().context("no list")?.iter();
        let found =
            all.find(|endpoint| endpoint["ipv4"] == address && endpoint["state"] == "ready");
        let found = found.with_context(|| format!("{address} is not listed: {list}"))?;
        found["id"].as_u64().context("id")
    })
}

#[test]
fn a_pod_whose_addresses_change_while_the_agent_is_down_keeps_its_names() {
    with_lab(|lab| {
        for (name, address) in learned() {
            lab.zone.set(&name, &[address], 600);
        }
        lab.zone.set("later.good.test", &[web4(12)], 600);
        lab.zone.set("last.good.test", &[web4(13)], 600);
        let programs = lab.start(&good_names())?;
        let id = lab.endpoint_id(&lab.a)?;
        for (name, address) in learned() {
            lab.a.ask(&Query::a(&name, DNS4))?.expect(address)?;
        }
        programs.agent.kill_9()?;
        // Learned without an agent, at the pod's former address.
        lab.a
            .ask(&Query::a("later.good.test", DNS4))?
            .expect(web4(12))?;
        readdress(lab, &lab.a, 11, 21)?;
        let agent = lab.start_agent(&AgentOptions::default())?;
        let now = endpoint_at(lab, "10.77.0.21")?;
        ensure!(now == id, "the endpoint was {id} and is {now}");
        lab.connected("one")?;
        eventually("the names are open", SOON, || {
            for (_, address) in learned() {
                lab.a.expect_open(at(address, 80))?;
            }
            lab.a.expect_open(at(web4(12), 80))
        })?;
        lab.a.expect_closed(at(web4(14), 80))?;
        lab.a
            .ask(&Query::a("last.good.test", DNS4))?
            .expect(web4(13))?;
        lab.a.expect_open(at(web4(13), 80))?;

        // A restart finds the new addresses in its files.
        agent.kill_9()?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        ensure!(endpoint_at(lab, "10.77.0.21")? == id, "another number");
        for (_, address) in learned() {
            lab.a.expect_open(at(address, 80))?;
        }
        // Another pod with the former addresses is another endpoint.
        readdress(lab, &lab.b, 12, 11)?;
        lab.agent(&[
            "endpoint",
            "add",
            "--netns",
            lab.b.netns.name(),
            "--labels",
            WEB,
        ])?;
        let other = endpoint_at(lab, "10.77.0.11")?;
        ensure!(other != id, "pod b is endpoint {id}");
        let names = lab.agent_json(&["fqdn", "cache", "list"])?;
        let of_b = names.as_array().context("no list")?;
        let of_b = of_b.iter().filter(|pair| pair["endpoint"] == other).count();
        ensure!(of_b == 0, "pod b has names of pod a: {names}");
        Ok(())
    });
}
