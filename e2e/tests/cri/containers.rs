//! The OCI hook puts containers of podman under policy from their first packet on. If the hook
//! fails, they do not start. Machines of systemd-nspawn are closed until they are under policy.
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use holdfast_e2e::bridge::Bridge;
use holdfast_e2e::cri::{Machine, Podman, Sent, endpoints, only_allowed_server};
use holdfast_e2e::lab::NODE4;
use holdfast_e2e::{AgentOptions, Lab, eventually, until, with_lab};

/// Longest wait until the agent has taken in a change of containers or documents.
pub(super) const SOON: Duration = Duration::from_secs(20);
/// Number of times that a container is started again.
const RESTARTS: u32 = 50;

/// Waits until the agent's status lists no problem.
pub(super) fn status_has_no_problem(lab: &Lab) -> Result<()> {
    eventually("status has no problem", SOON, || {
        let status = lab.agent_json(&["status"])?;
        ensure!(
            status["problems"].as_array().is_some_and(Vec::is_empty),
            "{}",
            status["problems"]
        );
        Ok(())
    })
}

/// Fails unless a command is refused with an error that contains all of `parts`.
pub(super) fn refused(result: Result<String>, parts: &[&str]) -> Result<()> {
    let error = match result {
        Ok(_) => anyhow::bail!("it started"),
        Err(error) => format!("{error:#}"),
    };
    for part in parts {
        ensure!(error.contains(part), "{part} is not in: {error}");
    }
    Ok(())
}

/// The container `web` has a document and may reach the allowed server only.
pub(super) fn web_with_a_document(lab: &Lab) -> Result<(Podman<'_>, Sent)> {
    let podman = Podman::new(lab)?;
    lab.write_policy("web.yaml", &only_allowed_server())?;
    podman.describe("web.yaml", "web", "")?;
    Ok((podman, Sent::watch(lab)?))
}

#[test]
fn a_container_that_is_started_again_and_again_is_judged_from_each_first_packet_on() {
    with_lab(|lab| {
        let (podman, sent) = web_with_a_document(lab)?;
        let _agent = podman.start_agent(AgentOptions::default())?;
        // The world sees the node's address. A container without a document is open: the probe receives its datagrams.
        podman.start("other", &[])?;
        sent.expect_open(NODE4)?;
        podman.run(&["rm", "--force", "--time", "0", "other"])?;
        sent.clear();
        podman.start("web", &[])?;
        sent.expect_judged(NODE4)?;
        let mut times = Vec::new();
        for _ in 0..RESTARTS {
            let begin = Instant::now();
            podman.run(&["restart", "--time", "0", "web"])?;
            times.push(begin.elapsed());
            sent.expect_judged(NODE4)?;
        }
        times.sort_unstable();
        println!("podman restart: p50 {:?}", times.get(times.len() / 2));
        Ok(())
    });
}

#[test]
fn a_container_with_a_document_waits_for_the_agent_and_then_does_not_start() {
    with_lab(|lab| {
        let (podman, sent) = web_with_a_document(lab)?;
        let agent = podman.start_agent(AgentOptions::default())?;
        podman.start("web", &[])?;
        sent.expect_judged(NODE4)?;
        agent.kill_9()?;
        // The running container stays under policy, and a container without a document still
        // starts.
        sent.expect_judged(NODE4)?;
        refused(
            podman.run(&["restart", "--time", "0", "web"]),
            &["podman/web has a document", "no agent answers"],
        )?;
        sent.expect_no_leak(NODE4)?;
        podman.start("other", &[])?;
        sent.expect_open(NODE4)?;
        podman.run(&["rm", "--force", "--time", "0", "other"])?;
        sent.clear();
        let _agent = podman.start_agent(AgentOptions::default())?;
        podman.run(&["start", "web"])?;
        sent.expect_judged(NODE4)?;
        // The agent finds a running container again by itself.
        status_has_no_problem(lab)
    });
}

#[test]
fn a_container_whose_network_no_document_covers_does_not_start() {
    with_lab(|lab| {
        let (podman, sent) = web_with_a_document(lab)?;
        let _agent = podman.start_agent(AgentOptions::default())?;
        let remove = || podman.run(&["rm", "--force", "--time", "0", "web"]);
        refused(
            podman.start("web", &["--network", "host"]),
            &["podman/web uses the network of the host"],
        )?;
        remove()?;
        podman.run(&["network", "create", "--subnet", "10.99.0.0/24", "second"])?;
        let two = ["--network", "podman,second"];
        refused(
            podman.start("web", &two),
            &["interface eth1 of the container podman/web"],
        )?;
        remove()?;
        sent.expect_no_leak(NODE4)?;
        podman.describe("second.yaml", "web", "ifname: eth1\n")?;
        eventually("it starts with a document for each interface", SOON, || {
            let _absent = remove();
            podman.start("web", &two)
        })?;
        sent.expect_judged(NODE4)?;
        // A container that joins the network of `web` is under the policy of `web`.
        podman.start("side", &["--network", "container:web"])?;
        sent.expect_judged(NODE4)?;
        podman.run(&["rm", "--force", "--time", "0", "side"])?;
        remove()?;
        podman.start("web", &["--network", "none"])?;
        remove()?;
        sent.expect_no_leak(NODE4)
    });
}

#[test]
fn a_machine_of_nspawn_that_is_started_again_and_again_is_closed_until_it_is_judged() {
    with_lab(|lab| {
        let bridge = Bridge::new(lab, "br0")?;
        let address = "10.88.0.40".parse()?;
        let web = Machine::new(lab, &bridge, "web", 40)?;
        let other = Machine::new(lab, &bridge, "other", 41)?;
        lab.write_policy("web.yaml", &only_allowed_server())?;
        let document = "interface: vb-web\naddresses: [10.88.0.40]\nlabels: [k8s:app=web]\n";
        std::fs::write(lab.directory().join("endpoints/web.yaml"), document)?;
        let sent = Sent::watch(lab)?;
        let agent = lab.start_agent(&AgentOptions::default())?;
        // A machine without a document is open: the probe receives its datagrams.
        let running = other.start()?;
        sent.expect_open("10.88.0.41".parse()?)?;
        running.stop()?;
        let mut running = web.start()?;
        sent.expect_judged(address)?;
        for _ in 0..RESTARTS {
            running.stop()?;
            running = web.start()?;
            sent.expect_judged(address)?;
        }
        // Without the agent, no packet of a new machine passes.
        agent.kill_9()?;
        sent.expect_judged(address)?;
        running.stop()?;
        sent.clear();
        let running = web.start()?;
        std::thread::sleep(Duration::from_secs(2));
        ensure!(!sent.senders().contains(&address), "it sent");
        let _agent = lab.start_agent(&AgentOptions::default())?;
        sent.expect_judged(address)?;
        running.stop()?;
        until(
            "the endpoint goes with its machine",
            SOON,
            || endpoints(lab),
            Vec::is_empty,
        )?;
        Ok(())
    });
}

#[test]
fn a_container_on_a_bridge_with_a_document_is_judged_from_its_first_packet_on() {
    with_lab(|lab| {
        let podman = Podman::new(lab)?;
        lab.write_policy("web.yaml", &only_allowed_server())?;
        podman.run(&["network", "create", "--subnet", "10.98.0.0/24", "ours"])?;
        let format = ["--format", "{{.NetworkInterface}}"];
        let bridge = podman.run(&[&["network", "inspect", "ours"], &format[..]].concat())?;
        let bridge = bridge.trim();
        let document = format!("bridge: {bridge}\nlabels: [k8s:app=web]\n");
        std::fs::write(lab.directory().join("endpoints/bridge.yaml"), document)?;
        let sent = Sent::watch(lab)?;
        let agent = podman.start_agent(AgentOptions::default())?;
        podman.start("open", &[])?;
        sent.expect_open(NODE4)?;
        podman.run(&["rm", "--force", "--time", "0", "open"])?;
        sent.clear();
        let ours = ["--network", "ours"];
        podman.start("one", &ours)?;
        sent.expect_judged(NODE4)?;
        podman.start("two", &ours)?;
        for _ in 0..5 {
            podman.run(&["restart", "--time", "0", "two"])?;
            sent.expect_judged(NODE4)?;
        }
        let keys = endpoints(lab)?;
        ensure!(
            keys.len() == 2
                && keys
                    .iter()
                    .all(|key| key.starts_with("port/dir/bridge.yaml/")),
            "{keys:?}"
        );
        agent.kill_9()?;
        refused(
            podman.run(&["restart", "--time", "0", "two"]),
            &[&format!(
                "it is connected to {bridge}, whose ports have a document"
            )],
        )?;
        let _agent = podman.start_agent(AgentOptions::default())?;
        sent.expect_judged(NODE4)?;
        // The container's own document takes precedence over the document of the bridge.
        podman.describe("two.yaml", "two", "")?;
        eventually("it starts under its own document", SOON, || {
            podman.run(&["start", "two"])?;
            let keys = endpoints(lab)?;
            ensure!(
                keys.len() == 2 && keys.iter().any(|key| key == "dir/two.yaml"),
                "{keys:?}"
            );
            Ok(())
        })?;
        sent.expect_judged(NODE4)?;
        podman.run(&["rm", "--force", "--time", "0", "one", "two"])?;
        until(
            "the endpoints go with their containers",
            SOON,
            || endpoints(lab),
            Vec::is_empty,
        )?;
        podman.run(&["network", "rm", "ours"]).map(drop)
    });
}
