//! A container that is started again has another network namespace and another interface. If the
//! new interface takes the place of the endpoint's interface, it is closed until it is an endpoint
//! itself. `status` says what is closed, what is open, and which command adds it.
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::bridge::Bridge;
use holdfast_e2e::lab::{at, web4};
use holdfast_e2e::policy::{WEB, cidr, egress};
use holdfast_e2e::{AgentOptions, Lab, Pod, Program, eventually, with_lab};

const SOON: Duration = Duration::from_secs(20);
const OPEN: u8 = 10;
const DENIED: u8 = 12;

fn start(lab: &Lab) -> Result<Program> {
    lab.write_policy("web.yaml", &egress("web", "web", &cidr("203.0.113.10/32")))?;
    lab.start_agent(&AgentOptions::default())
}

/// Waits until `status` has a problem with all of these.
fn says(lab: &Lab, parts: &[&str]) -> Result<()> {
    eventually("status says it", SOON, || {
        let status = lab.agent_json(&["status"])?;
        let problems = status.get("problems").context("problems")?.to_string();
        for part in parts {
            ensure!(problems.contains(part), "{part} is not in: {problems}");
        }
        Ok(())
    })
}

fn says_nothing_of(lab: &Lab, key: &str) -> Result<()> {
    eventually("status has no problem any more", SOON, || {
        let status = lab.agent_json(&["status"])?;
        let problems = status.get("problems").context("problems")?.to_string();
        ensure!(!problems.contains(key), "{problems}");
        Ok(())
    })
}

fn is_under_policy(lab: &Lab, pod: &Pod) -> Result<()> {
    lab.endpoint_id(pod)?;
    pod.expect_closed(at(web4(DENIED), 80))?;
    pod.expect_open(at(web4(OPEN), 80))
}

fn is_closed(pod: &Pod) -> Result<()> {
    pod.expect_closed(at(web4(DENIED), 80))?;
    pod.expect_closed(at(web4(OPEN), 80))
}

/// Gives the host side of a pod another name.
fn rename(lab: &Lab, pod: &mut Pod, name: &str) -> Result<()> {
    let Pod {
        host_side, v4, v6, ..
    } = &*pod;
    lab.node.batch(&format!(
        "link set {host_side} down\n\
         link set {host_side} name {name}\n\
         link set {name} up\n\
         address replace fe80::1/64 dev {name} nodad\n\
         route replace {v4}/32 dev {name}\n\
         route replace {v6}/128 dev {name}"
    ))?;
    pod.host_side = name.to_owned();
    Ok(())
}

#[test]
fn a_container_that_gets_its_interfaces_name_again_is_closed_until_it_is_added_again() {
    with_lab(|lab| {
        let agent = start(lab)?;
        let first = lab.add_pod("c", 13)?;
        let process = first.process()?;
        let host_side = first.host_side.clone();
        let key = format!("cli/pid-{}/eth0", process.pid());
        lab.agent(&["endpoint", "add", "--pid", &process.pid(), "--labels", WEB])?;
        is_under_policy(lab, &first)?;

        drop(process);
        drop(first);
        let add = format!("endpoint add --pid PID --ifname eth0 --labels '{WEB}'");
        says(lab, &[&key, "is open", &add])?;
        let mut second = lab.add_pod("again", 14)?;
        rename(lab, &mut second, &host_side)?;
        says(lab, &[&format!("nothing passes {host_side}"), &add])?;
        is_closed(&second)?;

        // A restart of the agent opens nothing.
        agent.kill_9()?;
        is_closed(&second)?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        says(lab, &[&format!("nothing passes {host_side}"), &add])?;
        is_closed(&second)?;

        let process = second.process()?;
        lab.agent(&["endpoint", "add", "--pid", &process.pid(), "--labels", WEB])?;
        is_under_policy(lab, &second)?;
        says_nothing_of(lab, &key)
    });
}

#[test]
fn a_container_that_gets_its_address_again_is_closed_until_its_endpoint_is_removed() {
    with_lab(|lab| {
        let _agent = start(lab)?;
        let first = lab.add_pod("c", 13)?;
        let name = first.netns.name().to_owned();
        let key = format!("cli/{name}/eth0");
        lab.agent(&["endpoint", "add", "--netns", &name, "--labels", WEB])?;
        is_under_policy(lab, &first)?;
        drop(first);
        let again = lab.add_pod("again", 13)?;
        says(lab, &[&key, &format!("nothing passes {}", again.host_side)])?;
        is_closed(&again)?;
        lab.agent(&["endpoint", "remove", &key])?;
        eventually("the interface is open", SOON, || {
            again.expect_open(at(web4(DENIED), 80))
        })
    });
}

#[test]
fn a_container_on_a_bridge_that_gets_its_address_again_is_closed() {
    with_lab(|lab| {
        let agent = start(lab)?;
        let bridge = Bridge::new(lab, "podman1")?;
        let first = bridge.add_pod("p", 11)?;
        let document = lab.directory().join("endpoints/p.yaml");
        let of = |pod: &Pod| format!("netns: {}\nlabels: [{WEB}]\n", pod.netns.name());
        std::fs::write(&document, of(&first))?;
        is_under_policy(lab, &first)?;
        drop(first);
        let mut again = bridge.add_pod("q", 11)?;
        let neighbour = bridge.add_pod("r", 12)?;
        says(lab, &["dir/p.yaml", "nothing passes lxcq", "the new netns"])?;
        is_closed(&again)?;
        // The container does not open itself by another address, and a restart of the agent does
        // not open it.
        again.netns.batch(
            "address del 10.88.0.11/24 dev eth0\n\
             address del fd88::b/64 dev eth0\n\
             address add 10.88.0.13/24 dev eth0\n\
             route replace default via 10.88.0.1",
        )?;
        again.v4 = "10.88.0.13".parse()?;
        neighbour.expect_open(at(web4(DENIED), 80))?;
        is_closed(&again)?;
        agent.kill_9()?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        says(lab, &["dir/p.yaml", "nothing passes lxcq"])?;
        is_closed(&again)?;
        neighbour.expect_open(at(web4(DENIED), 80))?;
        std::fs::write(&document, of(&again))?;
        lab.endpoint_id(&again)?;
        // The container's last request for the node's MAC got no answer. It fails three seconds
        // after the first attempt, and with it each connection that waits for the MAC.
        again.netns.batch("neighbour flush dev eth0")?;
        is_under_policy(lab, &again)?;
        says_nothing_of(lab, "dir/p.yaml")
    });
}
