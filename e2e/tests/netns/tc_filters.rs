//! Where the kernel has no TCX, policy is enforced by filters of traffic control: replaced without
//! a gap, repaired, found again by the next agent, removed by `cleanup`. Filters of other programs
//! stay.
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::lab::{DNS4, UDP_PORT, at, web4};
use holdfast_e2e::node::AGENT_METRICS;
use holdfast_e2e::policy::{WEB, good_names};
use holdfast_e2e::{AgentOptions, Lab, Query, SdpOptions, config, eventually, shell, with_lab};
use shared_maps::pin;
use shared_maps::user::has_tcx;

const SOON: Duration = Duration::from_secs(10);
/// Makes the agent work as on a kernel without TCX.
const WITHOUT_TCX: &str = "--enable-tcx=false";

fn options() -> AgentOptions {
    AgentOptions::default().flag(WITHOUT_TCX)
}

/// Filters of the pod's interface, as tc(8) lists them.
fn filters(lab: &Lab, direction: &str) -> Result<String> {
    let interface = lab.a.host_side.as_str();
    let listed = lab
        .node
        .run("tc", &["filter", "show", "dev", interface, direction])?;
    Ok(listed)
}

/// Programs of the agent at the pod's interface, in running order.
fn order(lab: &Lab, direction: &str) -> Result<Vec<String>> {
    let listed = filters(lab, direction)?;
    let words = listed.split_whitespace();
    let names = words.filter(|word| word.starts_with("holdfast:"));
    Ok(names
        .map(|name| name.rsplit('/').next().unwrap_or(name).to_owned())
        .collect())
}

fn in_force(lab: &Lab) -> Result<()> {
    eventually("policy is in force", SOON, || {
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;
        lab.a.expect_open(at(web4(10), 80))?;
        lab.a.expect_closed(at(web4(12), 80))
    })
}

fn repairs(lab: &Lab) -> Result<f64> {
    let name = "holdfast_reconcile_differences_total";
    lab.metric(AGENT_METRICS, name, "part=\"programs\"")
}

/// Does `harm`, and waits until the agent has repaired it.
fn repaired(lab: &Lab, harm: impl FnOnce() -> Result<()>) -> Result<()> {
    let before = repairs(lab)?;
    harm()?;
    eventually("programs are repaired", SOON, || {
        ensure!(repairs(lab)? > before);
        Ok(())
    })?;
    in_force(lab)
}

/// Adds a filter that another program could have added: it passes every packet at once.
fn add_other(lab: &Lab, priority: &str) -> Result<()> {
    let interface = lab.a.host_side.as_str();
    let filter = [
        "filter",
        "add",
        "dev",
        interface,
        "ingress",
        "prio",
        priority,
        "handle",
        "0x7",
        "protocol",
        "all",
        "bpf",
        "bytecode",
        "1,6 0 0 4294967295,",
    ];
    lab.node.run("tc", &filter).map(drop)
}

/// Pins of the pod's programs.
fn pins(lab: &Lab) -> Result<PathBuf> {
    let id = lab.endpoint_id(&lab.a)?.to_string();
    Ok(lab.bpf_root().join(pin::LINKS).join(id))
}

#[test]
fn filters_enforce_policy_and_status_says_so() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        let _programs = lab.start_with(&good_names(), &options())?;
        in_force(lab)?;
        ensure!(
            order(lab, "ingress")? == ["from_pod"],
            "{}",
            filters(lab, "ingress")?
        );
        ensure!(
            order(lab, "egress")? == ["to_pod"],
            "{}",
            filters(lab, "egress")?
        );
        let status = lab.agent(&["status"])?;
        ensure!(status.contains("tc filters (Linux "), "{status}");
        ensure!(!status.contains("PROBLEM"), "{status}");
        let (_, ready) = lab.http(AGENT_METRICS, "/readyz")?;
        ensure!(ready.contains("programs: tc filters (Linux "), "{ready}");

        // A filter of another program keeps its place behind the agent's filter, and is listed.
        add_other(lab, "49152")?;
        in_force(lab)?;
        let status = lab.agent(&["status"])?;
        ensure!(
            status.contains("tc filter pref 49152 handle 0x7 bpf (ingress) on lxca"),
            "{status}"
        );
        ensure!(!status.contains("PROBLEM"), "{status}");
        Ok(())
    });
}

#[test]
fn filters_that_are_removed_or_overtaken_are_repaired() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        let _programs = lab.start_with(&good_names(), &options())?;
        in_force(lab)?;
        lab.repairs.expect();
        let interface = lab.a.host_side.clone();
        let tc = |arguments: &[&str]| lab.node.run("tc", arguments).map(drop);
        repaired(lab, || tc(&["filter", "del", "dev", &interface, "ingress"]))?;
        repaired(lab, || tc(&["filter", "del", "dev", &interface, "egress"]))?;
        // Both directions at once.
        repaired(lab, || tc(&["qdisc", "del", "dev", &interface, "clsact"]))?;
        // The pins record the filters and do not attach them.
        let pins = pins(lab)?;
        repaired(lab, || Ok(std::fs::remove_dir_all(&pins)?))?;

        // Among filters of one priority, the last one to come runs first: this one passes every packet at
        // once, until ours is the first again.
        repaired(lab, || add_other(lab, "1"))?;
        let listed = filters(lab, "ingress")?;
        ensure!(
            listed.contains("handle 0x7"),
            "the other filter stays: {listed}"
        );
        let first = listed.lines().find(|line| line.contains("handle"));
        ensure!(
            first.is_some_and(|line| line.contains("from_pod")),
            "{listed}"
        );
        Ok(())
    });
}

#[test]
fn a_restart_and_a_change_of_the_way_of_attachment_lose_nothing_and_let_nothing_pass() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        let programs = lab.start_with(&good_names(), &options())?;
        in_force(lab)?;
        let kept = lab.a.datagrams(at(web4(10), UDP_PORT))?;
        let shut = lab.a.datagrams(at(web4(12), UDP_PORT))?;
        let stream = lab.a.stream(at(web4(10), 80))?;
        let mut agent = programs.agent;
        let ways = [
            options(),
            AgentOptions::default(),
            options(),
            AgentOptions::default(),
        ];
        for (number, way) in ways.iter().enumerate() {
            if number % 2 == 0 {
                agent.kill_9()?;
            } else {
                agent.terminate(SOON)?;
            }
            agent = lab.start_agent(way)?;
            in_force(lab)?;
            let names = order(lab, "ingress")?;
            match way.flags.is_empty() && has_tcx()? {
                true => ensure!(names.is_empty(), "filters are left: {names:?}"),
                false => ensure!(names == ["from_pod"], "{names:?}"),
            }
        }
        stream.expect_alive()?;
        let (sent, answered) = kept.finish();
        ensure!(sent == answered && sent > 100, "{answered} of {sent}");
        let (sent, answered) = shut.finish();
        ensure!(answered == 0 && sent > 100, "{answered} of {sent} passed");
        Ok(())
    });
}

#[test]
fn filters_outlive_their_pins_and_the_next_agent_replaces_them() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        let programs = lab.start_with(&good_names(), &options())?;
        in_force(lab)?;
        lab.repairs.expect();
        programs.agent.kill_9()?;
        std::fs::remove_dir_all(lab.bpf_root().join(pin::LINKS))?;
        std::fs::remove_dir_all(lab.bpf_root().join(pin::GLOBALS))?;
        lab.a.expect_closed(at(web4(12), 80))?;
        let _agent = lab.start_agent(&options())?;
        in_force(lab)?;
        ensure!(
            order(lab, "ingress")? == ["from_pod"],
            "{}",
            filters(lab, "ingress")?
        );
        ensure!(
            order(lab, "egress")? == ["to_pod"],
            "{}",
            filters(lab, "egress")?
        );
        Ok(())
    });
}

#[test]
fn cleanup_removes_the_filters_and_leaves_those_of_others() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        let programs = lab.start_with(&good_names(), &options())?;
        in_force(lab)?;
        add_other(lab, "100")?;
        let (agent, sdp) = (programs.agent, programs.sdp);
        sdp.terminate(SOON)?;
        agent.terminate(SOON)?;
        lab.a.expect_closed(at(web4(12), 80))?;
        let program = config::program("holdfast-agent")?;
        let mut command = lab.node.command(program.to_str().context("not UTF-8")?);
        command.arg("cleanup").arg("--bpf-root").arg(lab.bpf_root());
        command
            .arg("--state-dir")
            .arg(lab.directory().join("state"));
        let removed = shell::finish(&mut command)?;
        ensure!(
            removed.contains("removed 2 tc filters of programs"),
            "{removed}"
        );
        lab.a.expect_open(at(web4(12), 80))?;
        let left = filters(lab, "ingress")?;
        ensure!(
            left.contains("handle 0x7") && !left.contains("_pod"),
            "{left}"
        );
        Ok(())
    });
}

#[test]
fn at_the_qdisc_ingress_the_pod_is_restricted_and_status_names_what_is_missing() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        let interface = lab.a.host_side.clone();
        let qdisc = |arguments: &[&str]| lab.node.run("tc", arguments).map(drop);
        qdisc(&["qdisc", "add", "dev", &interface, "ingress"])?;
        lab.write_policy("web.yaml", &good_names())?;
        let _agent = lab.start_agent(&options())?;
        let _sdp = lab.start_sdp(&SdpOptions::default())?;
        lab.repairs.expect();
        let remedy = "remove what made it (tc qdisc del dev NAME ingress)";
        let netns = lab.a.netns.name();
        let added = lab.agent(&["endpoint", "add", "--netns", netns, "--labels", WEB]);
        let refused = added.err().context("it is added in force")?.to_string();
        ensure!(refused.contains(remedy), "{refused}");
        lab.a.expect_closed(at(web4(12), 80))?;
        // At this hook, `to_pod` would judge what the pod sends.
        ensure!(
            order(lab, "ingress")? == ["from_pod"],
            "{}",
            filters(lab, "ingress")?
        );
        eventually("status says it", SOON, || {
            let status = lab.agent(&["status"])?;
            ensure!(status.contains(remedy), "{status}");
            Ok(())
        })?;
        qdisc(&["qdisc", "del", "dev", &interface, "ingress"])?;
        in_force(lab)
    });
}

#[test]
fn a_filter_beside_a_pinned_link_is_removed_with_its_endpoint() {
    with_lab(|lab| {
        let document = lab.directory().join("endpoints/a.yaml");
        let netns = lab.a.netns.name();
        lab.write_policy("web.yaml", &good_names())?;
        std::fs::write(&document, format!("netns: {netns}\nlabels: [{WEB}]\n"))?;
        let agent = lab.start_agent(&options())?;
        let pins = pins(lab)?;
        lab.a.expect_closed(at(web4(12), 80))?;
        agent.kill_9()?;
        // The state after an agent that ended between adding the new filter and pinning it.
        let link = lab.bpf_root().join(pin::LINKS).join("hf_steer_link_v1");
        for pin in std::fs::read_dir(&pins)? {
            let pin = pin?.path();
            if pin.to_string_lossy().contains("from_pod") {
                std::fs::remove_file(&pin)?;
                std::fs::rename(&link, &pin)?;
            }
        }
        std::fs::remove_file(&document)?;
        let _agent = lab.start_agent(&options())?;
        eventually("the pod is no endpoint any more", SOON, || {
            lab.a.expect_open(at(web4(12), 80))
        })?;
        let left = filters(lab, "ingress")?;
        ensure!(!left.contains("from_pod"), "{left}");
        Ok(())
    });
}
