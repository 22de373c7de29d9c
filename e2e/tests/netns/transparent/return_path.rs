//! The return path: real answers to the proxy, and forged ones.

use std::net::SocketAddr;
use std::process::Stdio;

use holdfast_e2e::lab::OTHER_DNS4;
use holdfast_e2e::packet::{ACK, FIN, Packet, RST, SYN, tcp, udp};
use holdfast_e2e::policy::CLIENT;

use super::*;

/// The ports from which the proxy queries `server` over UDP.
fn ports(lab: &Lab, server: IpAddr) -> Result<Vec<u16>> {
    ports_of(lab, "-Hnua", server)
}

fn ports_of(lab: &Lab, sockets: &str, server: IpAddr) -> Result<Vec<u16>> {
    let server = match server {
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => format!("[{ip}]"),
    };
    let sockets = lab.node.run("ss", &[sockets, "dst", &server])?;
    let own = |line: &str| -> Option<u16> {
        let local = line.split_whitespace().nth(3)?;
        local.rsplit(':').next()?.parse().ok()
    };
    Ok(sockets.lines().filter_map(own).collect())
}

#[test]
fn the_proxy_gets_only_answers_of_its_own_flows() {
    with_lab(|lab| {
        let _programs = start(lab)?;
        for _ in 0..20 {
            lab.a
                .ask(&Query::a("www.good.test", DNS4))?
                .expect(web4(10))?;
        }
        let ports = ports(lab, DNS4)?;
        let port = *ports.first().context("no socket of the proxy's")?;
        let pod = IpAddr::from(lab.a.v4);
        // Only over IPv4 can a process write headers.
        let send = |from: IpAddr, sport, to: IpAddr, dport| -> Result<()> {
            let packet = Packet::new(from, to, udp(sport, dport)).ip();
            lab.world.enter(|| -> Result<()> {
                let raw = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(255)))?;
                raw.send_to(&packet, &at(to, 0).into())?;
                Ok(())
            })?
        };
        let counts = || -> Result<[u64; 3]> {
            Ok([
                lab.counted(Reason::Returned)?,
                lab.counted(Reason::ForgedAnswer)?,
                lab.counted(Reason::Allowed)?,
            ])
        };
        let free = (50_000..).find(|p| !ports.contains(p)).context("no port")?;
        let [returned, forged, allowed] = counts()?;
        // From the server: to the flow, and to a port without a flow.
        send(DNS4, 53, pod, port)?;
        send(DNS4, 53, pod, free)?;
        // From others, and from another port of the server.
        send(OTHER_DNS4, 53, pod, port)?;
        send(DNS4, 5300, pod, port)?;
        eventually("the packets are counted", LIMIT, || {
            let now = counts()?;
            ensure!(now[..2] == [returned + 1, forged + 1], "{now:?}");
            ensure!(now[2] >= allowed + 2, "{now:?}");
            Ok(())
        })?;
        // The message on the flow is not a DNS message.
        eventually("the proxy has got one of them", LIMIT, || {
            let now = lab.metric(SDP_METRICS, "holdfast_dns_answers_total", "unexpected")?;
            ensure!(now == 1.0, "{now}");
            Ok(())
        })?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;
        Ok(())
    });
}

#[test]
fn answers_come_through_an_interface_without_link_layer_as_well() {
    with_lab(|lab| {
        let _programs = start(lab)?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;
        let port = *ports(lab, DNS4)?.first().context("no socket")?;
        let mut tunnel = lab
            .node
            .command("/usr/bin/python3")
            .args(["-c", include_str!("tun.py"), "tun0", "4242"])
            .stdin(Stdio::piped())
            .spawn()?;
        eventually("the agent has seen the tunnel", LIMIT, || {
            let pins = lab.bpf_root().join(shared_maps::pin::TO_PROXY_LINKS);
            let pin = pins.join("to_proxy_4242");
            ensure!(pin.exists(), "no {}", pin.display());
            Ok(())
        })?;
        let returned = lab.counted(Reason::Returned)?;
        let packet = Packet::new(DNS4, lab.a.v4.into(), udp(53, port)).ip();
        let line: String = packet.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut lines = tunnel.stdin.take().context("no pipe")?;
        writeln!(lines, "{line}")?;
        eventually("the answer is counted", LIMIT, || {
            let now = lab.counted(Reason::Returned)?;
            ensure!(now == returned + 1, "{now}");
            Ok(())
        })?;
        // Another interface gets the same number before the agent checks.
        writeln!(lines, "again")?;
        eventually("the answer is counted again", LIMIT, || {
            writeln!(lines, "{line}")?;
            let now = lab.counted(Reason::Returned)?;
            ensure!(now > returned + 1, "{now}");
            Ok(())
        })?;
        drop(lines);
        ensure!(tunnel.wait()?.success());
        Ok(())
    });
}

/// Sends from an address and port of another host.
fn forge_datagram(netns: &Netns, from: SocketAddr, to: SocketAddr) -> Result<()> {
    netns.enter(|| -> Result<()> {
        let domain = Domain::for_address(from);
        let socket = Socket::new(domain, Type::DGRAM, Some(Protocol::UDP))?;
        if from.is_ipv6() {
            socket.set_ip_transparent_v6(true)?;
        } else {
            socket.set_ip_transparent_v4(true)?;
        }
        socket.bind(&from.into())?;
        socket.send_to(b"forged", &to.into())?;
        Ok(())
    })?
}

fn forge_segment(netns: &Netns, from: SocketAddr, to: SocketAddr, flags: u8) -> Result<()> {
    let mut packet = Packet::new(from.ip(), to.ip(), tcp(from.port(), to.port(), flags)).ip();
    // RFC 9293, 3.1: over addresses, protocol, length and segment.
    let words = packet[12..].chunks(2).map(|word| match word {
        [high, low] => u32::from(u16::from_be_bytes([*high, *low])),
        _ => unreachable!("an even length"),
    });
    let sum = words.sum::<u32>() + 6 + u32::try_from(packet.len() - 20)?;
    let checksum = !u16::try_from((sum & 0xffff) + (sum >> 16))?;
    packet[36..38].copy_from_slice(&checksum.to_be_bytes());
    netns.enter(|| -> Result<()> {
        let raw = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(255)))?;
        raw.send_to(&packet, &at(to.ip(), 0).into())?;
        Ok(())
    })?
}

#[test]
fn a_pod_that_forges_answers_has_no_more_effect_than_a_host_outside() {
    with_lab(|lab| {
        let _programs = start(lab)?;
        let unexpected = || lab.metric(SDP_METRICS, "holdfast_dns_answers_total", "unexpected");
        let mut forged = Vec::new();
        for (server, pod) in [(DNS4, lab.a.v4.into()), (DNS6, lab.a.v6.into())] {
            lab.a
                .ask(&Query::a("www.good.test", server))?
                .expect(web4(10))?;
            let port = *ports(lab, server)?.first().context("no socket")?;
            forged.push((server, at(server, 53), at(pod, port)));
        }
        // Without policy, pod b is like any host outside of the cluster. A sender that does not
        // guess the id has no effect.
        for (server, from, to) in &forged {
            let before = unexpected()?;
            forge_datagram(&lab.b.netns, *from, *to)?;
            eventually("the proxy has got it", LIMIT, || {
                let now = unexpected()?;
                ensure!(now == before + 1.0, "{now}");
                Ok(())
            })?;
            lab.a
                .ask(&Query::a("www.good.test", *server))?
                .expect(web4(10))?;
        }
        lab.add_endpoint(&lab.b, CLIENT)?;
        let before = unexpected()?;
        for (server, from, to) in &forged {
            let spoofed = lab.counted(Reason::SpoofedSource)?;
            forge_datagram(&lab.b.netns, *from, *to)?;
            eventually("the forged packets of the pod are counted", LIMIT, || {
                let now = lab.counted(Reason::SpoofedSource)?;
                ensure!(now == spoofed + 1, "{now}");
                Ok(())
            })?;
            lab.a
                .ask(&Query::a("www.good.test", *server))?
                .expect(web4(10))?;
        }
        assert_eq!(unexpected()?, before);
        Ok(())
    });
}

#[test]
fn forged_segments_do_not_end_a_connection() {
    with_lab(|lab| {
        let _programs = start(lab)?;
        let mut stream = lab.a.connect(at(DNS4, 53), LIMIT)?;
        stream.set_read_timeout(Some(LIMIT))?;
        let mut ask = |id: u16| -> Result<()> {
            let query = Query::a("www.good.test", DNS4).encode(id)?;
            stream.write_all(&u16::try_from(query.len())?.to_be_bytes())?;
            stream.write_all(&query)?;
            let mut length = [0; 2];
            stream.read_exact(&mut length)?;
            let mut answer = vec![0; usize::from(u16::from_be_bytes(length))];
            stream.read_exact(&mut answer)?;
            ensure!(answer.starts_with(&id.to_be_bytes()), "{answer:?}");
            Ok(())
        };
        ask(1)?;
        let from_port = ports_of(lab, "-Hnt", DNS4)?;
        ensure!(from_port.len() == 1, "{from_port:?}");
        let to = at(lab.a.v4.into(), from_port[0]);
        for flags in [RST, RST | ACK, FIN | ACK, SYN] {
            let returned = lab.counted(Reason::Returned)?;
            forge_segment(&lab.b.netns, at(DNS4, 53), to, flags)?;
            eventually("the segment has come to the socket", LIMIT, || {
                let now = lab.counted(Reason::Returned)?;
                ensure!(now > returned, "{now}");
                Ok(())
            })?;
        }
        ask(2)?;
        assert_eq!(ports_of(lab, "-Hnt", DNS4)?, from_port);
        Ok(())
    });
}
