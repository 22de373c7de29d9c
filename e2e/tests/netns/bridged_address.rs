//! A container on a bridge gets another address: `status` names the container, and `observe` shows
//! what it sends. Its endpoint gets the address when its document is written again, or when the
//! endpoint is added again.
use std::fs::{File, FileTimes};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::bridge::Bridge;
use holdfast_e2e::lab::{at, web4};
use holdfast_e2e::policy::{WEB, cidr, egress};
use holdfast_e2e::{AgentOptions, Lab, Pod, eventually, with_lab};

const SOON: Duration = Duration::from_secs(20);
const OPEN: u8 = 10;
const DENIED: u8 = 12;

/// Replaces the address of a pod on the bridge.
fn readdress(pod: &mut Pod, to: &str) -> Result<()> {
    let from = pod.v4;
    pod.netns.batch(&format!(
        "address del {from}/24 dev eth0\n\
         address add {to}/24 dev eth0\n\
         route replace default via 10.88.0.1"
    ))?;
    pod.v4 = to.parse()?;
    Ok(())
}

fn problems(lab: &Lab) -> Result<String> {
    let status = lab.agent_json(&["status"])?;
    Ok(status.get("problems").context("problems")?.to_string())
}

fn is_named(lab: &Lab, parts: &[&str]) -> Result<()> {
    eventually("status names the address", SOON, || {
        let said = problems(lab)?;
        for part in parts {
            ensure!(said.contains(part), "{part} is not in: {said}");
        }
        Ok(())
    })
}

/// Policy applies to the address, and `status` no longer names it.
fn counts(lab: &Lab, pod: &Pod) -> Result<()> {
    lab.endpoint_id(pod)?;
    // An ARP request that was dropped before is repeated after a second.
    eventually("the address counts", SOON, || {
        pod.expect_open(at(web4(OPEN), 80))
    })?;
    pod.expect_closed(at(web4(DENIED), 80))?;
    eventually("status does not name the address", SOON, || {
        let said = problems(lab)?;
        ensure!(!said.contains(&pod.v4.to_string()), "{said}");
        Ok(())
    })
}

#[test]
fn a_bridged_container_with_another_address_is_named_and_its_document_takes_the_address_in() {
    with_lab(|lab| {
        lab.write_policy("web.yaml", &egress("web", "web", &cidr("203.0.113.10/32")))?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        let bridge = Bridge::new(lab, "podman1")?;
        let mut pod = bridge.add_pod("p", 11)?;
        let document = lab.directory().join("endpoints/p.yaml");
        let text = format!("netns: {}\nlabels: [{WEB}]\n", pod.netns.name());
        std::fs::write(&document, &text)?;
        counts(lab, &pod)?;

        let id = lab.endpoint_id(&pod)?;
        readdress(&mut pod, "10.88.0.21")?;
        pod.expect_closed(at(web4(OPEN), 80))?;
        let own = ["endpoint dir/p.yaml", "10.88.0.21", "10.88.0.11", "`touch`"];
        is_named(lab, &own)?;
        eventually("observe shows the ARP requests", SOON, || {
            let shown = lab.agent(&["observe"])?;
            let arp = "spoofed_source: ARP sender 10.88.0.21 target 10.88.0.1 ";
            ensure!(shown.contains(arp), "{shown}");
            ensure!(!shown.contains("[::]:0"), "{shown}");
            Ok(())
        })?;
        // A change of the labels, or of another document in the file, does not make the agent
        // accept the address.
        let other = lab.b.netns.name();
        let more = format!("{text}---\nnetns: {other}\nlabels: ['k8s:app=other']\n");
        std::fs::write(&document, more)?;
        lab.endpoint_id(&lab.b)?;
        is_named(lab, &["10.88.0.21", "10.88.0.11"])?;
        pod.expect_closed(at(web4(OPEN), 80))?;

        let written = std::fs::metadata(&document)?.modified()?;
        let touched = FileTimes::new().set_modified(written + Duration::from_secs(5));
        File::options()
            .write(true)
            .open(&document)?
            .set_times(touched)?;
        counts(lab, &pod)?;
        ensure!(lab.endpoint_id(&pod)? == id, "it is another endpoint");
        Ok(())
    });
}

#[test]
fn a_bridged_container_with_another_address_gets_it_when_it_is_added_again() {
    with_lab(|lab| {
        lab.write_policy("web.yaml", &egress("web", "web", &cidr("203.0.113.10/32")))?;
        let agent = lab.start_agent(&AgentOptions::default())?;
        let bridge = Bridge::new(lab, "podman1")?;
        let mut pod = bridge.add_pod("p", 11)?;
        let name = pod.netns.name().to_owned();
        let add = ["endpoint", "add", "--netns", &name, "--labels", WEB];
        lab.agent(&add)?;
        counts(lab, &pod)?;
        readdress(&mut pod, "10.88.0.21")?;
        is_named(lab, &[&name, "10.88.0.21", "holdfast-agent endpoint add"])?;
        // The pod chooses its address: a restart of the agent does not accept it.
        agent.kill_9()?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        is_named(lab, &[&name, "10.88.0.21"])?;
        pod.expect_closed(at(web4(OPEN), 80))?;
        lab.agent(&add)?;
        counts(lab, &pod)
    });
}
