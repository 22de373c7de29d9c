//! `cargo xtask bench datapath`: cost of the eBPF programs per packet.
//!
//! It measures `from_pod` and `to_pod` with `BPF_PROG_TEST_RUN` (the kernel's own clock, without
//! the stack). It measures `steer` with the kernel's run statistics while a pod floods a proxy over
//! a veth.

mod before;

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use agent_core::tunnel_mode::TunnelMode;
use anyhow::{Context as _, Result, ensure};
use aya::sys::{Stats, enable_stats};
use clap::Args;
use holdfast_e2e::kernel::node::{Node, with_node, with_node_attached};
use holdfast_e2e::kernel::tunnel::{Wrapped, with_tunnel};
use holdfast_e2e::kernel::{From, PEER, PEER4, PEER6, POD4, POD6, with_kernel};
use holdfast_e2e::packet::{ACK, Packet, tcp, udp};
use serde_json::Value;
use shared_maps::policy::{EGRESS, INGRESS};
use shared_maps::steering::{KIND_SDP, SLOTS};

/// Cost of the eBPF programs.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Runs per packet of a known connection
    #[arg(long, default_value_t = 2_000_000)]
    repeat: u32,
    /// New connections
    #[arg(long, default_value_t = 50_000)]
    ports: u16,
    /// Rounds of the comparison of TCX links with tc filters, and of the comparison of --before
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Seconds of flood per row
    #[arg(long, default_value_t = 3)]
    seconds: u64,
    /// Object of an earlier build (bpf/prebuilt/holdfast-bpf.o of a commit). The benchmark then compares
    /// its programs with those of this build, and measures nothing else
    #[arg(long, value_name = "FILE")]
    before: Option<PathBuf>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    if let Some(object) = &options.before {
        return before::compare(object, options.rounds);
    }
    programs(options);
    tunnel(options);
    attachments(options);
    for (name, tproxy) in [("own redirect", false), ("nft TPROXY", true)] {
        for slots in [1, SLOTS] {
            for server in [PEER4, PEER6] {
                steering(options, name, tproxy, slots, server);
            }
        }
    }
    Ok(())
}

fn programs(options: &Options) {
    with_kernel(|k| {
        k.redirect_dns()?;
        k.allow(PEER, EGRESS, 6, 80)?;
        k.allow(PEER, EGRESS, 17, 80)?;
        for (family, pod, peer) in [("IPv4", POD4, PEER4), ("IPv6", POD6, PEER6)] {
            for (what, transport) in [
                ("TCP segment, allowed, known connection", tcp(4000, 80, ACK)),
                ("UDP query, redirected, known connection", udp(4000, 53)),
                ("UDP packet, refused", udp(4000, 99)),
            ] {
                let frame = Packet::new(pod, peer, transport).frame();
                k.send(&frame)?;
                let ns = k.cost(&frame, options.repeat)?;
                println!("from_pod  {family}  {what}: {ns} ns");
            }
        }
        k.allow(PEER, INGRESS, 17, 90)?;
        for (family, pod, peer) in [("IPv4", POD4, PEER4), ("IPv6", POD6, PEER6)] {
            let inward = Packet::new(peer, pod, udp(5000, 90)).frame();
            k.receive(&inward, From::Outside)?;
            let reply = Packet::new(pod, peer, udp(90, 5000)).frame();
            let ns = k.cost(&reply, options.repeat)?;
            println!("from_pod  {family}  UDP reply, known connection: {ns} ns");
            let ns = k.cost_in(&inward, options.repeat)?;
            println!("to_pod    {family}  UDP packet, allowed, known connection: {ns} ns");
            k.send(&Packet::new(pod, peer, tcp(4000, 80, ACK)).frame())?;
            let reply = Packet::new(peer, pod, tcp(80, 4000, ACK)).frame();
            let ns = k.cost_in(&reply, options.repeat)?;
            println!("to_pod    {family}  TCP reply, known connection: {ns} ns");
        }
        let stats = enable_stats(Stats::RunTime)?;
        let before = run_stats("from_pod")?;
        for port in 0..options.ports {
            let packet = Packet::new(POD4, PEER4, udp(port + 10_000, 53));
            k.send(&packet.frame())?;
        }
        let new = per_run(before, run_stats("from_pod")?)?;
        println!(
            "from_pod  IPv4  UDP query, redirected, each of {} source ports for the first time: {new} ns",
            options.ports
        );
        drop(stats);
        Ok(())
    });
}

/// Measures the programs of native devices, and `to_pod` behind them, in each tunnel mode.
fn tunnel(options: &Options) {
    const POD: Ipv4Addr = Ipv4Addr::new(172, 16, 1, 2);
    const PEER: Ipv4Addr = Ipv4Addr::new(172, 16, 5, 9);
    const IDENTITY: u32 = 4242;
    for mode in TunnelMode::ALL {
        with_tunnel(mode, |k| {
            k.local_pod(POD, IDENTITY)?;
            let out = Packet::new(POD.into(), PEER.into(), udp(4000, 80));
            let inner = Packet::new(PEER.into(), POD.into(), udp(80, 4000));
            let wrapped = Wrapped::new(PEER, POD, IDENTITY, &inner).frame();
            for (program, what, frame) in [
                ("to_net", "UDP packet to a pod of another node", out.frame()),
                ("from_net", "wrapped packet", wrapped),
                ("from_net", "plain UDP packet", inner.frame()),
            ] {
                // One by one: the program changes the packet.
                let stats = enable_stats(Stats::RunTime)?;
                k.cost_at_device(program, &frame, 1)?;
                let before = run_stats(program)?;
                for _ in 0..options.ports {
                    k.cost_at_device(program, &frame, 1)?;
                }
                let ns = per_run(before, run_stats(program)?)?;
                drop(stats);
                println!("{program}  IPv4  {what}, {}: {ns} ns", mode.as_str());
            }
            Ok(())
        });
    }
}

/// Packets of a pod through its veth to a program that drops them, with programs attached by TCX
/// links and by tc filters in turn.
fn attachments(options: &Options) {
    let rate = |tcx: bool| {
        let mut rate = 0.0;
        with_node_attached(tcx, |node| {
            let (sent, elapsed) = flood(node, (PEER4, 99), Duration::from_secs(options.seconds))?;
            rate = f64::from(sent) / elapsed.as_secs_f64() / 1000.0;
            Ok(())
        });
        rate
    };
    let mut ratios = Vec::new();
    for _ in 0..options.rounds {
        let (tcx, filter) = (rate(true), rate(false));
        println!(
            "attached  IPv4  UDP packet, refused: TCX links {tcx:.0} k/s, tc filters {filter:.0} k/s"
        );
        ratios.push(filter / tcx);
    }
    ratios.sort_by(f64::total_cmp);
    if let (Some(least), Some(median), Some(most)) =
        (ratios.first(), ratios.get(ratios.len() / 2), ratios.last())
    {
        println!("attached  tc filters / TCX links: {median:.3} ({least:.3} to {most:.3})");
    }
}

fn steering(options: &Options, name: &str, tproxy: bool, slots: u32, server: IpAddr) {
    with_node(|node| {
        if tproxy {
            node.tproxy()?;
        }
        let proxies: Vec<_> = (0..slots)
            .map(|slot| node.proxy(slot, KIND_SDP))
            .collect::<Result<_>>()?;
        let stats = enable_stats(Stats::RunTime)?;
        let before = run_stats("steer")?;
        let (sent, elapsed) = flood(node, (server, 53), Duration::from_secs(options.seconds))?;
        let ns = per_run(before, run_stats("steer")?)?;
        drop(stats);
        let kpps = f64::from(sent) / elapsed.as_secs_f64() / 1000.0;
        let family = if server.is_ipv4() { "IPv4" } else { "IPv6" };
        println!(
            "steer  {family}  {name}, {slots} live slots: {ns} ns per lookup, pod sent {kpps:.0} k/s"
        );
        drop(proxies);
        Ok(())
    });
}

/// Sends from one socket for `time`. Nothing reads the packets, so queues overflow after the
/// lookup.
fn flood(
    node: &Node<'_>,
    (server, port): (IpAddr, u16),
    time: Duration,
) -> Result<(u32, Duration)> {
    node.pod().enter(|| {
        let any = if server.is_ipv4() {
            "0.0.0.0:0"
        } else {
            "[::]:0"
        };
        let socket = UdpSocket::bind(any)?;
        socket.connect((server, port))?;
        let start = Instant::now();
        let mut sent = 0;
        while start.elapsed() < time {
            for _ in 0..100 {
                sent += u32::from(socket.send(&[0; 40]).is_ok());
            }
        }
        Ok((sent, start.elapsed()))
    })?
}

/// Nanoseconds and runs of the newest program with this name.
fn run_stats(name: &str) -> Result<(u64, u64)> {
    let output = Command::new("bpftool")
        .args(["-j", "prog", "show"])
        .output()
        .context("bpftool")?;
    let programs: Value = serde_json::from_slice(&output.stdout)?;
    let newest = programs
        .as_array()
        .into_iter()
        .flatten()
        .filter(|program| program["name"] == name)
        .max_by_key(|program| program["id"].as_u64())
        .with_context(|| format!("no program {name}"))?;
    let number = |key: &str| newest[key].as_u64().unwrap_or_default();
    Ok((number("run_time_ns"), number("run_cnt")))
}

fn per_run(before: (u64, u64), after: (u64, u64)) -> Result<u64> {
    let runs = after.1 - before.1;
    ensure!(runs > 0, "the program did not run");
    Ok((after.0 - before.0) / runs)
}
