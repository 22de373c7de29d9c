//! A container that restarts into another network namespace sends nothing until it is under policy
//! again. The same holds for processes that it left in the old namespace.
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::lab::{UDP_PORT, at, web4};
use holdfast_e2e::pod::Flood;
use holdfast_e2e::policy::{WEB, cidr, egress};
use holdfast_e2e::{AgentOptions, Lab, Program, eventually, shell, with_lab};
use shared_maps::event::Reason;

const SOON: Duration = Duration::from_secs(20);
/// Web server that policy allows, by the number that `web4` takes.
const OPEN: u8 = 10;
/// Web server that policy does not allow.
const DENIED: u8 = 12;
/// Host side of the new interface of pod a.
const HOST_SIDE: &str = "lxcnew";
const HOST_MAC: &str = "02:00:00:00:00:77";

/// An agent, and pod a as an endpoint that may reach one server.
fn start(lab: &Lab, options: &[&str]) -> Result<Program> {
    lab.write_policy("web.yaml", &egress("web", "web", &cidr("203.0.113.10/32")))?;
    let agent = lab.start_agent(&AgentOptions::default())?;
    let name = lab.a.netns.name();
    let add = ["endpoint", "add", "--netns", name, "--labels", WEB];
    lab.agent(&[&add[..], options].concat())?;
    Ok(agent)
}

/// Waits until pod a's new interface is an endpoint, with a number other than `before`, that
/// reaches only the server that policy allows.
fn followed(lab: &Lab, before: u64) -> Result<()> {
    eventually("the new interface is under policy", SOON, || {
        ensure!(lab.endpoint_id(&lab.a)? != before, "it is the old one");
        lab.a.expect_closed(at(web4(DENIED), 80))?;
        lab.a.expect_open(at(web4(OPEN), 80))
    })
}

/// Checks that packets were sent, and that none of them reached the server that policy denies.
fn none_arrived(lab: &Lab, floods: Vec<Flood>) -> Result<()> {
    for flood in floods {
        ensure!(flood.finish() > 0, "nothing was sent");
    }
    let arrived = lab.web.visits(at(web4(DENIED), UDP_PORT));
    ensure!(arrived == 0, "{arrived} datagrams reached the server");
    Ok(())
}

/// Replaces the namespace of pod a. The interface to the node is `inside`, and the node's side of
/// the interface is down. The pod needs no answer from the node to send packets.
fn replace_namespace(lab: &Lab, inside: &str) -> Result<()> {
    let name = lab.a.netns.name();
    shell::run("ip", &["netns", "delete", name])?;
    shell::run("ip", &["netns", "add", name])?;
    lab.node.batch(&format!(
        "link add {HOST_SIDE} address {HOST_MAC} type veth peer name {inside} netns {name}"
    ))?;
    lab.a.netns.batch(&format!(
        "link set lo up\n\
         address add {}/32 dev {inside}\n\
         link set {inside} up\n\
         route add 10.77.0.1/32 dev {inside}\n\
         route add default via 10.77.0.1 dev {inside}\n\
         neigh replace 10.77.0.1 lladdr {HOST_MAC} dev {inside}",
        lab.a.v4
    ))
}

/// Sets the node's side of pod a's new interface up.
fn connect(lab: &Lab) -> Result<()> {
    lab.node.batch(&format!(
        "link set {HOST_SIDE} up\nroute replace {}/32 dev {HOST_SIDE}",
        lab.a.v4
    ))
}

fn closed_interfaces(lab: &Lab, expected: f64) -> Result<()> {
    eventually("interfaces are closed", SOON, || {
        let closed = lab.metric(9962, "holdfast_endpoint_closed_interfaces", "")?;
        ensure!(closed == expected, "{closed} interfaces, not {expected}");
        Ok(())
    })
}

/// Waits until packets of closed interfaces arrive and are dropped.
fn dropped_here(lab: &Lab) -> Result<()> {
    let before = lab.counted(Reason::NoEndpoint)?;
    eventually("packets of a closed interface are counted", SOON, || {
        let now = lab.counted(Reason::NoEndpoint)?;
        ensure!(now > before + 100, "{before} before, {now} now");
        Ok(())
    })
}

#[test]
fn a_pod_that_renames_its_new_interface_reaches_nothing_until_it_is_under_policy() {
    with_lab(|lab| {
        let agent = start(lab, &[])?;
        lab.a.expect_open(at(web4(OPEN), 80))?;
        let denied = at(web4(DENIED), UDP_PORT);
        // The sockets keep the old namespace alive.
        let left = lab.a.flood(denied)?;

        replace_namespace(lab, "hidden0")?;
        let restarted = lab.a.flood(denied)?;
        closed_interfaces(lab, 1.0)?;
        connect(lab)?;
        dropped_here(lab)?;
        lab.a.expect_closed(at(web4(OPEN), 80))?;
        let status = lab.agent_json(&["status"])?;
        let said = status.get("problems").context("problems")?.to_string();
        ensure!(said.contains(HOST_SIDE), "status does not name it: {said}");

        // A restart of the agent opens nothing.
        agent.kill_9()?;
        dropped_here(lab)?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        closed_interfaces(lab, 1.0)?;
        dropped_here(lab)?;

        lab.a.netns.batch(
            "link set hidden0 down\n\
             link set hidden0 name eth0\n\
             link set eth0 up\n\
             route add 10.77.0.1/32 dev eth0\n\
             route add default via 10.77.0.1 dev eth0",
        )?;
        eventually("the new interface is under policy", SOON, || {
            lab.a.expect_open(at(web4(OPEN), 80))
        })?;
        lab.a.expect_closed(at(web4(DENIED), 80))?;
        none_arrived(lab, vec![left, restarted])
    });
}

#[test]
fn processes_in_the_old_namespace_reach_nothing_once_the_new_one_is_followed() {
    with_lab(|lab| {
        let _agent = start(lab, &[])?;
        let denied = at(web4(DENIED), UDP_PORT);
        let left = lab.a.flood(denied)?;
        let before = lab.endpoint_id(&lab.a)?;
        replace_namespace(lab, "eth0")?;
        connect(lab)?;
        followed(lab, before)?;
        closed_interfaces(lab, 1.0)?;
        dropped_here(lab)?;
        none_arrived(lab, vec![left])?;
        // When the last process of the old namespace ends, the interface is removed.
        closed_interfaces(lab, 0.0)
    });
}

#[test]
fn an_interface_without_an_address_is_closed_until_its_document_is_removed() {
    with_lab(|lab| {
        let document = lab.directory().join("endpoints/a.yaml");
        lab.a.netns.batch("address flush dev eth0")?;
        let name = lab.a.netns.name();
        std::fs::write(&document, format!("netns: {name}\nlabels: [{WEB}]\n"))?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        closed_interfaces(lab, 1.0)?;
        std::fs::remove_file(&document)?;
        closed_interfaces(lab, 0.0)?;
        lab.a.netns.batch(&format!(
            "address add {own}/32 dev eth0\n\
             route replace 10.77.0.1/32 dev eth0\n\
             route replace default via 10.77.0.1 dev eth0 src {own}",
            own = lab.a.v4
        ))?;
        lab.a.expect_open(at(web4(DENIED), 80))
    });
}

#[test]
fn a_namespace_that_is_replaced_under_its_name_is_followed() {
    with_lab(|lab| {
        let _agent = start(lab, &["--enable-policy=always"])?;
        lab.a.expect_open(at(web4(OPEN), 80))?;
        let before = lab.endpoint_id(&lab.a)?;
        let other = ["endpoint", "add", "--netns", lab.b.netns.name()];
        let said = lab.agent(&[&other[..], &["--labels", "k8s:app=free"]].concat())?;
        ensure!(
            said.contains("unrestricted: no policy selects it"),
            "{said}"
        );
        let status = lab.agent(&["status"])?;
        ensure!(status.contains("1 unrestricted ("), "{status}");

        replace_namespace(lab, "eth0")?;
        connect(lab)?;
        followed(lab, before)
    });
}

/// Numbers of an interface, and of its peer.
fn numbers(netns: &holdfast_e2e::netns::Netns, name: &str) -> Result<(u64, u64)> {
    let links: serde_json::Value =
        serde_json::from_str(&netns.run("ip", &["-j", "link", "show", name])?)?;
    let number = |key| {
        links[0][key]
            .as_u64()
            .with_context(|| format!("{name}: no {key}"))
    };
    Ok((number("ifindex")?, number("link_index")?))
}

#[test]
fn a_pod_that_copies_the_numbers_of_another_pods_interfaces_closes_nothing() {
    with_lab(|lab| {
        let _agent = start(lab, &[])?;
        // Pod b is no endpoint.
        lab.b.expect_open(at(web4(DENIED), 80))?;
        let (of_b, inside_b) = numbers(&lab.node, &lab.b.host_side)?;
        lab.a.netns.batch(&format!(
            "link delete eth0\n\
             link add foo index {inside_b} type veth peer name bar index {of_b}"
        ))?;
        eventually("the pod is looked for", SOON, || {
            let status = lab.agent_json(&["status"])?;
            let problems = status.get("problems").context("problems")?.to_string();
            ensure!(problems.contains("foo"), "{problems}");
            Ok(())
        })?;
        lab.b.expect_open(at(web4(DENIED), 80))?;
        closed_interfaces(lab, 0.0)
    });
}

#[test]
fn a_pod_that_copies_the_numbers_of_a_pair_of_the_node_stays_under_policy() {
    with_lab(|lab| {
        let agent = start(lab, &[])?;
        lab.node.batch(
            "link add vh0 index 900 type veth peer name vh1 index 901\n\
             link set vh0 up\n\
             link set vh1 up\n\
             route add 10.99.0.0/24 dev vh0",
        )?;
        let denied = at(web4(DENIED), 80);
        lab.a.expect_closed(denied)?;
        // The interface in the pod gets another name.
        lab.a.netns.batch(
            "link set eth0 down\n\
             link set eth0 name x1\n\
             link set x1 up\n\
             route add 10.77.0.1/32 dev x1\n\
             route add default via 10.77.0.1 dev x1\n\
             link add eth0 index 901 type veth peer name bar index 900\n\
             address add 10.99.0.5/32 dev eth0\n\
             link set eth0 up",
        )?;
        agent.kill_9()?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        lab.a.expect_closed(denied)?;
        let added = [
            "endpoint",
            "add",
            "--netns",
            lab.a.netns.name(),
            "--labels",
            "k8s:app=other",
        ];
        ensure!(
            lab.agent(&added).is_err(),
            "a pair of the node became the pod's"
        );
        lab.a.expect_closed(denied)
    });
}
