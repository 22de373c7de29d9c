//! Documents about interfaces and bridges of the host: what they close, and what they do not.
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::bridge::Bridge;
use holdfast_e2e::lab::{at, web4};
use holdfast_e2e::policy::{cidr, egress};
use holdfast_e2e::{AgentOptions, Lab, Program, eventually, until, with_lab};
use nix::sys::signal::Signal;

const SOON: Duration = Duration::from_secs(20);
const OPEN: u8 = 10;
const DENIED: u8 = 12;
/// Ports that appear at once.
const MANY: u8 = 12;

fn describe(lab: &Lab, field: &str, name: &str) -> Result<()> {
    let document = format!("{field}: {name}\nlabels: [k8s:app=web]\n");
    Ok(std::fs::write(
        lab.directory().join("endpoints/it.yaml"),
        document,
    )?)
}

/// It is easy to write the name of the host's card instead of the name of the card inside a container.
#[test]
fn a_document_about_an_interface_of_the_host_itself_does_not_take_the_host_off_the_network() {
    with_lab(|lab| {
        let bridge = Bridge::new(lab, "br0")?;
        let pod = bridge.add_pod("p", 11)?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        for name in ["br0", "lo"] {
            describe(lab, "interface", name)?;
            eventually("status says that it is none", SOON, || {
                let status = lab.agent_json(&["status"])?;
                let problems = status["problems"].to_string();
                ensure!(
                    problems.contains(&format!("interface {name} ")),
                    "{problems}"
                );
                Ok(())
            })?;
            pod.expect_open(at(web4(OPEN), 80))?;
            let (code, _) = lab.http(9962, "/healthz")?;
            ensure!(code == 200, "{name}: {code}");
        }
        Ok(())
    });
}

/// Number of lines in the agent's log which say that a port is closed.
fn closed(agent: &Program) -> usize {
    let log = agent.log();
    let lines = log
        .lines()
        .filter(|line| line.contains("the interface is closed until"));
    lines
        .filter(|line| line.contains("interface=\"lxc"))
        .count()
}

#[test]
fn ports_that_appear_at_once_are_closed_before_the_first_one_is_an_endpoint() {
    with_lab(|lab| {
        let bridge = Bridge::new(lab, "br0")?;
        lab.write_policy("web.yaml", &egress("web", "web", &cidr("203.0.113.10/32")))?;
        describe(lab, "bridge", "br0")?;
        let agent = lab.start_agent(&AgentOptions::default())?;
        agent.signal(Signal::SIGSTOP)?;
        let ports = (0..MANY).map(|n| bridge.add_pod(&format!("p{n}"), 20 + n));
        let ports: Vec<_> = ports.collect::<Result<_>>()?;
        agent.signal(Signal::SIGCONT)?;
        eventually("the first endpoint", SOON, || {
            let endpoints = lab.agent_json(&["endpoint", "list"])?;
            ensure!(
                endpoints.as_array().is_some_and(|list| !list.is_empty()),
                "{endpoints}"
            );
            Ok(())
        })?;
        ensure!(
            closed(&agent) >= usize::from(MANY),
            "closed: {}",
            closed(&agent)
        );
        until(
            "every port is an endpoint",
            SOON,
            || {
                Ok(lab
                    .agent_json(&["endpoint", "list"])?
                    .as_array()
                    .context("a list")?
                    .len())
            },
            |count| *count == usize::from(MANY),
        )?;
        for port in &ports {
            eventually("its policy holds", SOON, || {
                port.expect_open(at(web4(OPEN), 80))
            })?;
            port.expect_closed(at(web4(DENIED), 80))?;
        }
        Ok(())
    });
}

/// The port's addresses were not checked: a container of docker may change them before the agent finds the port.
#[test]
fn a_port_that_has_an_address_of_the_world_does_not_get_it() {
    with_lab(|lab| {
        let bridge = Bridge::new(lab, "br0")?;
        lab.write_policy("web.yaml", &egress("web", "web", &cidr("203.0.113.10/32")))?;
        describe(lab, "bridge", "br0")?;
        let agent = lab.start_agent(&AgentOptions::default())?;
        agent.signal(Signal::SIGSTOP)?;
        let pod = bridge.add_pod("p", 11)?;
        let world = web4(OPEN);
        pod.netns.batch(&format!(
            "address del {own}/24 dev eth0\n\
             address add {world}/32 dev eth0\n\
             address add {own}/24 dev eth0\n\
             route replace default via 10.88.0.1",
            own = pod.v4
        ))?;
        agent.signal(Signal::SIGCONT)?;
        let list = until(
            "it is an endpoint",
            SOON,
            || Ok(lab.agent_json(&["endpoint", "list"])?.to_string()),
            |list| list.contains("port/dir/it.yaml"),
        )?;
        ensure!(list.contains(&pod.v4.to_string()), "{list}");
        ensure!(!list.contains(&world.to_string()), "{list}");
        Ok(())
    });
}

/// podman calls the first interface `veth0`, whatever container it leads to.
#[test]
fn the_interface_name_of_a_port_is_not_closed_for_the_next_container_with_it() {
    with_lab(|lab| {
        let bridge = Bridge::new(lab, "br0")?;
        describe(lab, "bridge", "br0")?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        let port = bridge.add_pod("p", 11)?;
        until(
            "it is an endpoint",
            SOON,
            || Ok(lab.agent_json(&["endpoint", "list"])?.to_string()),
            |list| list.contains("port/dir/it.yaml"),
        )?;
        let named = "interface: vb-web\nlabels: [k8s:app=web]\n";
        std::fs::write(lab.directory().join("endpoints/named.yaml"), named)?;
        let rules = until(
            "the documents are read again",
            SOON,
            || {
                let list = ["list", "table", "inet", "holdfast_v1_closed"];
                Ok(lab.node.run("nft", &list).unwrap_or_default())
            },
            |rules| rules.contains("vb-web"),
        )?;
        ensure!(!rules.contains(&port.host_side), "{rules}");
        Ok(())
    });
}
