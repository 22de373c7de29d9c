//! A pod sends nothing to the tunnels of its own node, which would unpack it as a packet of another pod.

use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::netpol_run::NETPOL_METRICS;
use holdfast_e2e::packet::{Packet, raw};
use holdfast_e2e::raw_frames::RawFrames;
use holdfast_e2e::{Lab, Pod, eventually, with_lab};
use serde_json::json;

use super::{Pods, SOON, of};

/// The node, as pods reach it.
const NODE4: [u8; 4] = [10, 77, 0, 1];
const NODE6: Ipv6Addr = Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 1);
/// Of VXLAN and Geneve, and of a device of the node.
const TUNNELS: [u16; 4] = [4789, 8472, 6081, 12_345];
const SERVER: u16 = 9000;

/// The ports of the node at which a datagram of the pod arrives.
fn arriving(lab: &Lab, from: &Pod, ports: &[u16]) -> Result<Vec<u16>> {
    let mut arrived = Vec::new();
    for port in ports {
        let to = SocketAddr::new(NODE4.into(), *port);
        let server = lab.node.enter(|| UdpSocket::bind(to))??;
        server.set_read_timeout(Some(Duration::from_millis(300)))?;
        let client = from.netns.enter(|| UdpSocket::bind((from.v4, 0)))??;
        client.send_to(b"a packet of another pod", to)?;
        if server.recv_from(&mut [0; 64]).is_ok() {
            arrived.push(*port);
        }
    }
    Ok(arrived)
}

fn dropped(lab: &Lab) -> Result<f64> {
    let reason = "reason=\"tunnels\"";
    lab.metric(
        NETPOL_METRICS,
        "holdfast_netpol_dropped_packets_total",
        reason,
    )
}

/// MAC of an interface of the node.
fn mac(lab: &Lab, interface: &str) -> Result<[u8; 6]> {
    let text = lab.node.run("ip", &["-o", "link", "show", interface])?;
    let mut words = text.split_whitespace();
    let word = words.find(|word| *word == "link/ether").and(words.next());
    let bytes = word.context("no MAC")?.split(':');
    let bytes: Result<Vec<u8>, _> = bytes.map(|byte| u8::from_str_radix(byte, 16)).collect();
    Ok(bytes?.as_slice().try_into()?)
}

#[test]
fn a_pod_reaches_its_node_and_none_of_its_tunnels() {
    with_lab(|lab| {
        let _pods = Pods::new(lab)?;
        // Not up: it has no socket, and its port is free for the server of the test.
        lab.node
            .batch("link add tunnel type vxlan id 1 dstport 12345 nolearning")?;
        let netpol = lab.start_netpol(&[])?;
        let all = [&TUNNELS[..], &[SERVER]].concat();
        ensure!(arriving(lab, &lab.a, &all)? == all, "no pod is restricted");
        // The sender itself is open: it would reach b under any address.
        lab.write_network_policy("b", &json!({"podSelector": of("b"), "ingress": []}))?;
        eventually("only the server is reached", SOON, || {
            let arrived = arriving(lab, &lab.a, &all)?;
            ensure!(arrived == [SERVER], "{arrived:?}");
            Ok(())
        })?;

        let before = dropped(lab)?;
        let frames = RawFrames::open(&lab.a.netns)?;
        let gateway = mac(lab, &lab.a.host_side)?;
        let to: IpAddr = NODE6.into();
        for protocol in [4, 41, 47, 137] {
            let packet = Packet::new(lab.a.v6.into(), to, raw(protocol, &[0; 40]));
            let kind = 0x86dd_u16.to_be_bytes();
            let parts = [&gateway[..], &frames.mac(), &kind, &packet.ip()];
            frames.send(&parts.concat())?;
        }
        eventually("the packets are counted", SOON, || {
            let count = dropped(lab)? - before;
            ensure!(count > 3.5, "{count} packets");
            Ok(())
        })?;
        // The node's own programs use its tunnels.
        let node = lab
            .node
            .enter(|| UdpSocket::bind((IpAddr::from(NODE4), 0)))??;
        let server = lab
            .node
            .enter(|| UdpSocket::bind((IpAddr::from(NODE4), 4789)))??;
        server.set_read_timeout(Some(SOON))?;
        node.send_to(b"of the node", server.local_addr()?)?;
        server.recv_from(&mut [0; 64]).context("of the node")?;
        drop(netpol);
        Ok(())
    });
}
