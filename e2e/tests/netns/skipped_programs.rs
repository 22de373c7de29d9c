//! A pod that makes its packets skip the programs of its interface reaches nothing with them.
//!
//! A packet that comes back from an `ifb` device skips the programs and the actions of filters at
//! one hook. The device gives the packet back to the pod's own interface. If the filter there
//! matches the packet again, the filter's action is skipped. Otherwise the packet skips the hook at
//! the node's end of the link.
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use agent_datapath::nftables::{self, Family, TABLE};
use anyhow::{Result, ensure};
use holdfast_e2e::bridge::Bridge;
use holdfast_e2e::lab::{UDP_PORT, at, web4, web6};
use holdfast_e2e::policy::{WEB, cidr, egress};
use holdfast_e2e::raw_frames::RawFrames;
use holdfast_e2e::web::Web;
use holdfast_e2e::{AgentOptions, Lab, Pod, Program, eventually, with_lab};
use nix::sys::signal::Signal;

const SOON: Duration = Duration::from_secs(15);
const SHORT: Duration = Duration::from_millis(500);
/// Web server that policy allows, by the number that `web4` takes.
const OPEN: u8 = 10;
/// Web server that policy does not allow.
const DENIED: u8 = 12;

/// Makes the pod's packets go through an `ifb` device in the pod. The filter matches packets of queue 0. The
/// device has many queues, and a packet comes back with the number of the queue that the hash of its flow
/// selects.
fn skip_programs(pod: &Pod) -> Result<()> {
    let run = |program, line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        pod.netns.run(program, &words)
    };
    run("ip", "link add ifb0 numtxqueues 64 numrxqueues 64 type ifb")?;
    run("ip", "link set ifb0 up")?;
    run("tc", "qdisc add dev eth0 clsact")?;
    // `ld queue; jeq #0, match, other`, as numbers.
    let is_queue_0 = "4,32 0 0 4294963224,21 0 1 0,6 0 0 4294967295,6 0 0 0,";
    let filter = "filter add dev eth0 egress protocol all bpf bytecode";
    let action = "action mirred egress redirect dev ifb0";
    let words = filter.split(' ').chain([is_queue_0]);
    let words: Vec<&str> = words.chain(action.split(' ')).collect();
    pod.netns.run("tc", &words)?;
    Ok(())
}

fn stop_skipping(pod: &Pod) -> Result<()> {
    let qdisc = ["qdisc", "del", "dev", "eth0", "clsact"];
    pod.netns.run("tc", &qdisc)?;
    pod.netns.run("ip", &["link", "del", "ifb0"])?;
    Ok(())
}

/// An agent, and a pod that may reach one server.
fn start(lab: &Lab, pod: &Pod) -> Result<Program> {
    let servers = format!(
        "{}{}",
        cidr("203.0.113.10/32"),
        cidr(&format!("{}/128", web6(OPEN)))
    );
    lab.write_policy("web.yaml", &egress("web", "web", &servers))?;
    let agent = lab.start_agent(&AgentOptions::default())?;
    lab.add_endpoint(pod, WEB)?;
    Ok(agent)
}

/// Ends the agent, and takes away the rules that require the mark. Programs stay attached.
fn without_rules(lab: &Lab, mut agent: Program) -> Result<()> {
    agent.signal(Signal::SIGTERM)?;
    ensure!(agent.wait(SOON)?.success());
    for family in Family::ALL {
        ensure!(lab.node.enter(move || nftables::remove(family))??);
    }
    Ok(())
}

/// Sends requests for the node's address under addresses that are not the pod's.
fn forge_arp(pod: &Pod) -> Result<()> {
    let raw = RawFrames::open(&pod.netns)?;
    for host in 0..=255 {
        let (mac, sender, target) = (raw.mac(), [10, 66, 0, host], [10, 77, 0, 1]);
        let request: [&[u8]; 5] = [&[0, 1, 8, 0, 6, 4, 0, 1], &mac, &sender, &[0; 6], &target];
        let head: [&[u8]; 3] = [&[0xff; 6], &mac, &[8, 6]];
        raw.send(&[head.concat(), request.concat()].concat())?;
    }
    Ok(())
}

/// Number of the addresses of [`forge_arp`] that the node has as neighbours.
fn learnt(lab: &Lab) -> Result<usize> {
    let neighbours = lab.node.run("ip", &["-4", "neighbour", "show"])?;
    Ok(neighbours
        .lines()
        .filter(|line| line.starts_with("10.66."))
        .count())
}

#[test]
fn packets_that_skip_the_programs_of_a_routed_pod_are_dropped() {
    with_lab(|lab| {
        let agent = start(lab, &lab.a)?;
        let denied = [web4(DENIED), web6(DENIED)];
        let reaches = |is_open: bool| -> Result<()> {
            for ip in denied {
                let (tcp, udp) = (at(ip, 80), at(ip, UDP_PORT));
                match is_open {
                    // One flow of 64 gets queue 0, and is judged.
                    true => {
                        eventually("skipped", SOON, || lab.a.expect_open(tcp))?;
                        eventually("skipped", SOON, || lab.a.datagram(udp, SHORT))?;
                    }
                    false => {
                        lab.a.expect_closed(tcp)?;
                        ensure!(lab.a.datagram(udp, SHORT).is_err(), "{udp}");
                    }
                }
            }
            Ok(())
        };
        lab.a.expect_open(at(web4(OPEN), 80))?;
        lab.a.expect_open(at(web6(OPEN), 80))?;
        reaches(false)?;
        skip_programs(&lab.a)?;
        reaches(false)?;
        let visits: u64 = denied
            .iter()
            .map(|ip| lab.web.visits(at(*ip, UDP_PORT)) + lab.web.visits(at(*ip, 80)))
            .sum();
        ensure!(visits == 0, "{visits} packets or connections arrived");
        forge_arp(&lab.a)?;
        ensure!(learnt(lab)? == 0);
        let dropped = lab
            .node
            .run("nft", &["list", "chain", "inet", TABLE, "judged"])?;
        ensure!(!dropped.contains("packets 0 "), "{dropped}");

        without_rules(lab, agent)?;
        forge_arp(&lab.a)?;
        ensure!(learnt(lab)? > 0);
        reaches(true)?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        eventually("the rules are back", SOON, || {
            lab.a.expect_closed(at(web4(DENIED), 80))
        })?;
        reaches(false)?;
        stop_skipping(&lab.a)?;
        lab.a.expect_open(at(web4(OPEN), 80))?;
        lab.a.expect_open(at(web6(OPEN), 80))
    });
}

#[test]
fn packets_that_skip_the_programs_of_a_bridged_pod_are_dropped() {
    with_lab(|lab| {
        let bridge = Bridge::new(lab, "cni0")?;
        let pod = bridge.add_pod("p", 11)?;
        let neighbour = bridge.add_pod("q", 12)?;
        let own: [IpAddr; 2] = [neighbour.v4.into(), neighbour.v6.into()];
        let web = Web::start(&neighbour.netns, &own, &[80], &[])?;
        let agent = start(lab, &pod)?;
        let servers: [SocketAddr; 4] = [
            at(own[0], 80),
            at(own[1], 80),
            at(web4(DENIED), 80),
            at(web6(DENIED), 80),
        ];
        pod.expect_open(at(web4(OPEN), 80))?;
        skip_programs(&pod)?;
        for server in servers {
            pod.expect_closed(server)?;
        }
        ensure!(web.visits(servers[0]) + web.visits(servers[1]) == 0);

        without_rules(lab, agent)?;
        for server in servers {
            eventually("skipped", SOON, || pod.expect_open(server))?;
        }
        let _agent = lab.start_agent(&AgentOptions::default())?;
        eventually("the rules are back", SOON, || pod.expect_closed(servers[0]))?;
        for server in servers {
            pod.expect_closed(server)?;
        }
        stop_skipping(&pod)?;
        pod.expect_open(at(web4(OPEN), 80))
    });
}

#[test]
fn an_interface_whose_endpoint_was_removed_needs_no_mark() {
    with_lab(|lab| {
        let _agent = start(lab, &lab.a)?;
        lab.a.expect_closed(at(web4(DENIED), 80))?;
        let key = format!("cli/{}/eth0", lab.a.netns.name());
        lab.agent(&["endpoint", "remove", &key])?;
        lab.a.expect_open(at(web4(DENIED), 80))?;
        let link = lab
            .node
            .run("ip", &["link", "show", "dev", &lab.a.host_side])?;
        ensure!(link.contains("group default"), "{link}");
        Ok(())
    });
}

#[test]
fn an_interface_whose_endpoint_is_forgotten_sends_nothing_and_status_names_it() {
    with_lab(|lab| {
        let agent = start(lab, &lab.a)?;
        agent.kill_9()?;
        for dir in [lab.directory().join("state"), lab.endpoint_store()] {
            std::fs::remove_dir_all(&dir)?;
            std::fs::create_dir(&dir)?;
        }
        for entry in std::fs::read_dir(lab.bpf_root())? {
            std::fs::remove_dir_all(entry?.path())?;
        }
        // Filters outlive their pins.
        let port = lab.a.host_side.as_str();
        let _no_filters = lab.node.run("tc", &["qdisc", "del", "dev", port, "clsact"]);
        let _agent = lab.start_agent(&AgentOptions::default())?;
        lab.a.expect_closed(at(web4(OPEN), 80))?;
        let remedy = format!("ip link set dev {port} group default");
        let status = lab.agent(&["status"])?;
        ensure!(status.contains(&remedy), "{status}");
        let words: Vec<&str> = remedy.split(' ').collect();
        lab.node.run("ip", words.get(1..).unwrap_or_default())?;
        lab.a.expect_open(at(web4(DENIED), 80))
    });
}

#[test]
fn an_interface_that_left_the_group_is_put_back() {
    with_lab(|lab| {
        let _agent = start(lab, &lab.a)?;
        lab.repairs.expect();
        let port = lab.a.host_side.as_str();
        lab.node
            .run("ip", &["link", "set", "dev", port, "group", "7"])?;
        eventually("it is back", SOON, || {
            let link = lab.node.run("ip", &["link", "show", "dev", port])?;
            ensure!(link.contains("group 1215261796"), "{link}");
            Ok(())
        })?;
        lab.a.expect_open(at(web4(OPEN), 80))
    });
}

#[test]
fn rules_that_are_made_again_lose_no_packet() {
    const TIMES: usize = 500;
    with_lab(|lab| {
        let rules = format!("- toCIDR: [\"{}/32\"]\n", web4(OPEN));
        lab.write_policy("web.yaml", &egress("web", "web", &rules))?;
        let mut agent = lab.start_agent(&AgentOptions::default())?;
        lab.add_endpoint(&lab.a, WEB)?;
        // A running agent would see the tables in the middle of a change.
        agent.signal(Signal::SIGTERM)?;
        ensure!(agent.wait(SOON)?.success());
        let kept = lab.a.datagrams(at(web4(OPEN), UDP_PORT))?;
        for _ in 0..TIMES {
            lab.node
                .enter(|| Family::ALL.into_iter().try_for_each(nftables::install))??;
        }
        let (sent, echoed) = kept.finish();
        ensure!(sent > 1000 && sent == echoed, "{echoed} of {sent}");
        Ok(())
    });
}
