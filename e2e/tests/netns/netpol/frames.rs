//! Pods on one bridge: a frame that the table of policies does not see reaches no other pod.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::bridge::Bridge;
use holdfast_e2e::netpol_run::{NETPOL_METRICS, TABLE};
use holdfast_e2e::packet::{Packet, icmp, raw};
use holdfast_e2e::raw_frames::RawFrames;
use holdfast_e2e::{Lab, Pod, eventually, with_lab};
use serde_json::json;

use super::{PORT, Pods, SOON, both, of, reaches, status_has};

const ALL: [u8; 6] = [0xff; 6];
const UDP: u8 = 17;
/// Data that a frame carries to a pod.
const SECRET: &[u8] = b"no rule has seen this";

/// The VLAN tag 0 of a customer, and the tag of a service provider.
const TAG: [u8; 4] = [0x81, 0, 0, 0];
const PROVIDER: [u8; 4] = [0x88, 0xa8, 0, 0];

/// Number of frames that [`frames`] returns.
const FRAMES: usize = 9;

fn frames(from: &Pod, own: [u8; 6], to: &Pod, mac: [u8; 6]) -> Vec<(&'static str, Vec<u8>)> {
    let datagram = raw(UDP, &[&[0, 9, 0, 9, 0, 29, 0, 0], SECRET].concat());
    let four = Packet::new(from.v4.into(), to.v4.into(), datagram.clone()).ip();
    let six = Packet::new(from.v6.into(), to.v6.into(), datagram).ip();
    let of_router = |kind| {
        let message = icmp(true, kind, &[&[0; 12], SECRET].concat());
        let packet = Packet::new(from.v6.into(), to.v6.into(), message);
        packet.hop_limit(255).ip()
    };
    let session = [&[0x11, 0, 0, 1, 0, 51, 0, 0x21], four.as_slice()].concat();
    let frame = |to: [u8; 6], tags: &[[u8; 4]], kind: u16, payload: &[u8]| {
        [&to[..], &own, &tags.concat(), &kind.to_be_bytes(), payload].concat()
    };
    vec![
        ("a tag", frame(mac, &[TAG], 0x0800, &four)),
        ("a tag to all", frame(ALL, &[TAG], 0x0800, &four)),
        ("a tag before IPv6", frame(mac, &[TAG], 0x86dd, &six)),
        ("802.1ad", frame(mac, &[PROVIDER], 0x0800, &four)),
        ("two tags", frame(mac, &[TAG, TAG], 0x0800, &four)),
        ("PPPoE", frame(mac, &[], 0x8864, &session)),
        (
            "a router advertisement",
            frame(mac, &[], 0x86dd, &of_router(134)),
        ),
        ("a redirect", frame(mac, &[], 0x86dd, &of_router(137))),
        ("another protocol", frame(mac, &[], 0x88b5, SECRET)),
    ]
}

/// Sends each frame. Returns the names of the frames that arrive.
fn arriving(from: &Pod, to: &Pod) -> Result<Vec<&'static str>> {
    let (sender, reader) = (RawFrames::open(&from.netns)?, RawFrames::open(&to.netns)?);
    let mut arrived = Vec::new();
    for (name, frame) in frames(from, sender.mac(), to, reader.mac()) {
        sender.send(&frame).context(name)?;
        if arrives(&reader)? {
            arrived.push(name);
        }
    }
    Ok(arrived)
}

/// Whether a frame with the data arrives.
fn arrives(reader: &RawFrames) -> Result<bool> {
    let end = Instant::now() + Duration::from_millis(200);
    while let Some(left) = end.checked_duration_since(Instant::now()) {
        let Some(frame) = reader.next(left)? else {
            break;
        };
        if frame.windows(SECRET.len()).any(|part| part == SECRET) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn table(lab: &Lab) -> Result<String> {
    lab.node.run("nft", &["list", "table", "bridge", TABLE[1]])
}

fn bridge(lab: &Lab) -> Result<Bridge<'_>> {
    lab.node.sysctl(&[
        ("net.bridge.bridge-nf-call-iptables", "1"),
        ("net.bridge.bridge-nf-call-ip6tables", "1"),
    ])?;
    Bridge::new(lab, "br0")
}

#[test]
fn a_frame_under_a_tag_reaches_no_pod() {
    with_lab(|lab| {
        let bridge = bridge(lab)?;
        let (p, q) = (bridge.add_pod("p", 11)?, bridge.add_pod("q", 12)?);
        let _pods = Pods::of(lab, &[("p", &p), ("q", &q)])?;
        let netpol = lab.start_netpol(&["--flush-on-exit"])?;
        // While no pod is restricted, nothing changes on the bridge.
        ensure!(table(lab).is_err(), "there is a table of frames");
        let open = arriving(&p, &q)?;
        ensure!(open.len() == FRAMES, "only {open:?} arrive");

        let from_p = json!([{"from": [{"podSelector": of("p")}], "ports": [{"port": PORT}]}]);
        let spec = json!({"podSelector": of("q"), "ingress": from_p});
        lab.write_network_policy("q", &spec)?;
        eventually("the table of frames", SOON, || table(lab).map(drop))?;
        let passed = arriving(&p, &q)?;
        ensure!(passed.is_empty(), "{passed:?} arrive");
        // The restricted pod may not send such frames to an open pod, either.
        let passed = arriving(&q, &p)?;
        ensure!(passed.is_empty(), "{passed:?} arrive");
        let reason = "reason=\"frames\"";
        let dropped = lab.metric(
            NETPOL_METRICS,
            "holdfast_netpol_dropped_packets_total",
            reason,
        )?;
        ensure!(
            dropped > 2.0 * FRAMES as f64 - 0.5,
            "{dropped} frames are counted"
        );
        reaches(&p, &both(&q, PORT), true)?;
        reaches(&p, &both(&q, 8080), false)?;
        reaches(&q, &both(&p, 8080), true)?;

        // The table of frames is repaired like the other table, and both are removed at the end.
        lab.node
            .run("nft", &["delete", "table", "bridge", TABLE[1]])?;
        eventually("the repair", SOON, || table(lab).map(drop))?;
        let passed = arriving(&p, &q)?;
        ensure!(passed.is_empty(), "{passed:?} arrive");
        ensure!(netpol.terminate(SOON)?.success(), "exit code");
        ensure!(table(lab).is_err(), "the table of frames is left");
        ensure!(lab.netpol_table().is_err(), "the table is left");
        Ok(())
    });
}

#[test]
fn frames_of_other_bridges_and_between_ports_of_no_pods_pass() {
    with_lab(|lab| {
        let bridge = bridge(lab)?;
        let (p, q) = (bridge.add_pod("p", 11)?, bridge.add_pod("q", 12)?);
        let other = Bridge::without_address(lab, "br1")?;
        let (x, y) = (other.add_pod("x", 13)?, other.add_pod("y", 14)?);
        let _pods = Pods::of(lab, &[("p", &p), ("q", &q)])?;
        lab.write_network_policy("q", &json!({"podSelector": of("q"), "ingress": []}))?;
        let _netpol = lab.start_netpol(&[])?;
        eventually("the table of frames", SOON, || {
            let table = table(lab)?;
            ensure!(table.contains(&x.host_side), "{table}");
            Ok(())
        })?;
        let passed = arriving(&p, &q)?;
        ensure!(passed.is_empty(), "{passed:?} arrive");
        let passed = arriving(&x, &y)?;
        ensure!(passed.len() == FRAMES, "only {passed:?} arrive");
        status_has(lab, &["Ready            yes"])
    });
}

#[test]
fn datagrams_to_all_reach_no_pod_while_one_has_an_ingress_policy() {
    with_lab(|lab| {
        let bridge = bridge(lab)?;
        let (p, q) = (bridge.add_pod("p", 11)?, bridge.add_pod("q", 12)?);
        let _pods = Pods::of(lab, &[("p", &p), ("q", &q)])?;
        let _netpol = lab.start_netpol(&[])?;
        let all: Vec<IpAddr> = ["239.1.1.1", "10.88.0.255", "255.255.255.255", "ff05::7777"]
            .map(|address| address.parse().expect("an address"))
            .to_vec();
        let arriving = || -> Result<Vec<IpAddr>> {
            let (sender, reader) = (RawFrames::open(&p.netns)?, RawFrames::open(&q.netns)?);
            let mut arrived = Vec::new();
            for to in &all {
                let datagram = raw(UDP, &[&[0, 9, 0, 9, 0, 29, 0, 0], SECRET].concat());
                let (kind, from): (u16, IpAddr) = match to {
                    IpAddr::V4(_) => (0x0800, p.v4.into()),
                    IpAddr::V6(_) => (0x86dd, p.v6.into()),
                };
                let mut packet = Packet::new(from, *to, datagram).ip();
                if to.is_ipv4() {
                    let sum = checksum(&packet[..20]).to_be_bytes();
                    packet[10..12].copy_from_slice(&sum);
                }
                // The frame is for the receiver's MAC: only the IP address says that it is for all.
                let (to_mac, own) = (reader.mac(), sender.mac());
                sender.send(&[&to_mac[..], &own, &kind.to_be_bytes(), &packet].concat())?;
                if arrives(&reader)? {
                    arrived.push(*to);
                }
            }
            Ok(arrived)
        };
        ensure!(arriving()? == all, "no pod is restricted");
        let to_p = json!([{"to": [{"podSelector": of("p")}]}]);
        let egress = json!({"podSelector": of("q"), "policyTypes": ["Egress"], "egress": to_p});
        lab.write_network_policy("q", &egress)?;
        eventually("the table of frames", SOON, || table(lab).map(drop))?;
        ensure!(arriving()? == all, "no pod is restricted in ingress");
        let from_p = json!([{"from": [{"podSelector": of("p")}], "ports": [{"port": PORT}]}]);
        lab.write_network_policy("q", &json!({"podSelector": of("q"), "ingress": from_p}))?;
        eventually("nothing arrives", SOON, || {
            let arrived = arriving()?;
            ensure!(arrived.is_empty(), "{arrived:?}");
            Ok(())
        })?;
        // Neighbours still find each other.
        for netns in [&p.netns, &q.netns] {
            netns.batch("neighbour flush all")?;
        }
        reaches(&p, &both(&q, PORT), true)
    });
}

/// The checksum of an IPv4 header.
fn checksum(header: &[u8]) -> u16 {
    let words = header.chunks(2);
    let words = words.map(|word| (u32::from(word[0]) << 8) | u32::from(word[1]));
    let sum: u32 = words.sum();
    !u16::try_from((sum & 0xffff) + (sum >> 16)).expect("a short header")
}
