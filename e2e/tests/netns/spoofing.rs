//! False senders: a pod with a false source address, and answers that the proxy did not send.
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::lab::{DNS4, DNS6, UDP_PORT, at, web4, web6};
use holdfast_e2e::packet::{Packet, udp};
use holdfast_e2e::policy::{CLIENT, good_names};
use holdfast_e2e::{Netns, Query, eventually, with_lab};
use shared_maps::event::Reason;
use shared_maps::mark::MAGIC_FROM_EGRESS_PROXY;
use socket2::{Domain, Protocol, Socket, Type};

const SOON: Duration = Duration::from_secs(5);
const MANY: u64 = 20;

/// A UDP socket of `netns` that sends from an address which the namespace may not have.
fn transparent(netns: &Netns, from: SocketAddr, mark: u32) -> Result<UdpSocket> {
    netns.enter(|| -> Result<UdpSocket> {
        let socket = Socket::new(Domain::for_address(from), Type::DGRAM, None)?;
        if from.is_ipv4() {
            socket.set_ip_transparent_v4(true)?;
        } else {
            socket.set_ip_transparent_v6(true)?;
        }
        socket.set_mark(mark)?;
        socket.bind(&from.into())?;
        Ok(socket.into())
    })?
}

#[test]
fn a_false_source_reaches_nothing() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10), web6(10)], 600);
        let _programs = lab.start(&good_names())?;
        lab.add_endpoint(&lab.b, CLIENT)?;
        for query in [Query::a, Query::aaaa] {
            lab.a.ask(&query("www.good.test", DNS4))?;
        }
        let stranger4 = IpAddr::V4(Ipv4Addr::new(10, 77, 0, 99));
        let stranger6 = IpAddr::V6(Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 0x99));
        for (web, dns, sources) in [
            (web4(10), DNS4, [lab.b.v4.into(), stranger4, web4(11)]),
            (web6(10), DNS6, [lab.b.v6.into(), stranger6, web6(11)]),
        ] {
            let open = at(web, UDP_PORT);
            // The path works, and the neighbour is resolved.
            lab.a.datagram(open, SOON)?;
            let visits = lab.web.visits(open);
            let asked = lab.zone.asked("www.good.test");
            for from in sources {
                let dropped = lab.counted(Reason::SpoofedSource)?;
                let socket = transparent(&lab.a.netns, at(from, 0), 0)?;
                for _ in 0..MANY {
                    socket.send_to(b"false", open)?;
                    socket.send_to(&Query::a("www.good.test", dns).encode(7)?, at(dns, 53))?;
                }
                eventually("the drops are counted", SOON, || {
                    let now = lab.counted(Reason::SpoofedSource)?;
                    ensure!(now >= dropped + 2 * MANY, "{dropped} before, {now} now");
                    Ok(())
                })?;
            }
            // The packet that was sent after the false packets, on the same path, arrives.
            lab.a.datagram(open, SOON)?;
            lab.a.ask(&Query::a("www.good.test", dns))?;
            assert_eq!(lab.web.visits(open), visits + 1, "a false source arrived");
            assert_eq!(lab.zone.asked("www.good.test"), asked + 1, "it was asked");

            // An address that the pod added itself, and TCP from it.
            let [own, ..] = sources;
            let bits = if own.is_ipv4() { 32 } else { 128 };
            let nodad = if own.is_ipv4() { "" } else { "nodad" };
            lab.a
                .netns
                .batch(&format!("address add {own}/{bits} dev eth0 {nodad}"))?;
            lab.a.netns.settled()?;
            let refused = lab.a.netns.enter(|| -> Result<bool> {
                let socket = Socket::new(Domain::for_address(open), Type::STREAM, None)?;
                socket.bind(&at(own, 0).into())?;
                let wait = Duration::from_millis(350);
                Ok(socket.connect_timeout(&at(web, 80).into(), wait).is_err())
            })??;
            assert!(refused, "connected from {own}");
            assert_eq!(lab.web.visits(at(web, 80)), 0);
            lab.a
                .netns
                .batch(&format!("address del {own}/{bits} dev eth0"))?;
            lab.a.expect_open(at(web, 80))?;
        }
        // Metrics and `observe` show the drops.
        let total = lab.metric(9962, "holdfast_drop_count_total", "spoofed_source")?;
        assert!(total >= 12.0 * 20.0, "{total} drops in the agent's metrics");
        let observed = lab.agent(&["observe"])?;
        assert!(observed.contains("spoofed_source"), "{observed}");
        Ok(())
    });
}

#[test]
fn only_the_proxy_answers_for_a_redirected_server() {
    with_lab(|lab| {
        let programs = lab.start(&good_names())?;
        // Without a proxy, only the packets below answer the pod.
        programs.sdp.kill_9()?;
        for server in [DNS4, DNS6] {
            let v6 = server.is_ipv6();
            let pod: IpAddr = if v6 { lab.a.v6.into() } else { lab.a.v4.into() };
            let asker = lab.a.netns.enter(|| UdpSocket::bind(at(pod, 0)))??;
            asker.set_read_timeout(Some(SOON))?;
            asker.send_to(&Query::a("www.good.test", server).encode(7)?, (server, 53))?;
            let pod = at(pod, asker.local_addr()?.port());
            let forge = |netns: &Netns, mark, reason| -> Result<()> {
                let dropped = lab.counted(reason)?;
                transparent(netns, at(server, 53), mark)?.send_to(b"forged", pod)?;
                eventually("the forged answer is counted", SOON, || {
                    let now = lab.counted(reason)?;
                    ensure!(now > dropped, "{reason:?} is still {now}");
                    Ok(())
                })
            };
            let magic = MAGIC_FROM_EGRESS_PROXY;
            // Other processes of the node: without a mark, and with other marks.
            for mark in [0, 0x0c00, 0x0f00] {
                forge(&lab.node, mark, Reason::ForgedAnswer)
                    .with_context(|| format!("from the node with mark {mark:#x}"))?;
            }
            // Another pod. Marks do not cross namespaces.
            for mark in [0, magic] {
                forge(&lab.b.netns, mark, Reason::ForgedAnswer).context("from another pod")?;
            }
            // The server itself, without the proxy. Only over IPv4 can a process write headers.
            if !v6 {
                let dropped = lab.counted(Reason::ForgedAnswer)?;
                let packet = Packet::new(server, pod.ip(), udp(53, pod.port())).ip();
                lab.world.enter(|| -> Result<usize> {
                    let raw = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(255)))?;
                    Ok(raw.send_to(&packet, &at(pod.ip(), 0).into())?)
                })??;
                eventually("the server's own answer is counted", SOON, || {
                    ensure!(lab.counted(Reason::ForgedAnswer)? > dropped, "not yet");
                    Ok(())
                })?;
            }

            // Only the mark differs.
            transparent(&lab.node, at(server, 53), magic)?.send_to(b"proxy", pod)?;
            let mut buffer = [0; 16];
            let (length, from) = asker.recv_from(&mut buffer)?;
            assert_eq!(buffer.get(..length), Some(&b"proxy"[..]), "a forgery came");
            assert_eq!(from, at(server, 53));
            asker.set_nonblocking(true)?;
            assert!(asker.recv_from(&mut buffer).is_err(), "more came");
        }

        // An endpoint that forges an answer is stopped at its own interface.
        lab.add_endpoint(&lab.b, CLIENT)?;
        for (server, pod) in [(DNS4, IpAddr::V4(lab.a.v4)), (DNS6, lab.a.v6.into())] {
            let dropped = lab.counted(Reason::SpoofedSource)?;
            transparent(&lab.b.netns, at(server, 53), 0)?.send_to(b"forged", at(pod, 4000))?;
            eventually("the forged answer is counted", SOON, || {
                ensure!(lab.counted(Reason::SpoofedSource)? > dropped, "not yet");
                Ok(())
            })?;
        }
        Ok(())
    });
}
