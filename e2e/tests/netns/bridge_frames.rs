//! A pod on a bridge gets no other pod's packets, and two pods exchange nothing that policy does not
//! allow, whatever frames they send.
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::bridge::Bridge;
use holdfast_e2e::lab::{DNS4, at, web4, web6};
use holdfast_e2e::packet::{Packet, icmp, udp};
use holdfast_e2e::policy::{CLIENT, WEB, egress, good_names};
use holdfast_e2e::raw_frames::RawFrames;
use holdfast_e2e::{AgentOptions, Pod, Query, eventually, with_lab};
use shared_maps::event::Reason;

const SOON: Duration = Duration::from_secs(15);
const ALL: [u8; 6] = [0xff; 6];
/// Data that a pod wants another one to get.
const SECRET: &[u8] = b"no pod may read this";

fn frame(to: [u8; 6], from: [u8; 6], kind: u16, payload: &[u8]) -> Vec<u8> {
    [&to[..], &from, &kind.to_be_bytes(), payload].concat()
}

/// An ARP request of a pod for `target`.
fn request(mac: [u8; 6], pod: &Pod, target: [u8; 4]) -> Vec<u8> {
    let own = pod.v4.octets();
    [&[0, 1, 8, 0, 6, 4, 0, 1][..], &mac, &own, &[0; 6], &target].concat()
}

#[test]
fn frames_under_a_neighbours_mac_take_none_of_its_answers() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10), web6(10)], 600);
        let bridge = Bridge::new(lab, "cni0")?;
        let victim = bridge.add_pod("p", 11)?;
        let attacker = bridge.add_pod("q", 12)?;
        let _programs = lab.start(&good_names())?;
        lab.add_endpoint(&victim, WEB)?;
        lab.add_endpoint(&attacker, CLIENT)?;
        let query = Query::a("www.good.test", DNS4).within(Duration::from_millis(500));
        eventually("a first answer", SOON, || {
            victim.ask(&query)?.expect(web4(10))
        })?;

        let its = RawFrames::open(&victim.netns)?.mac();
        let raw = RawFrames::open(&attacker.netns)?;
        let arp = request(raw.mac(), &attacker, [10, 88, 0, 1]);
        let (stop, sent) = (AtomicBool::new(false), AtomicU32::new(0));
        let answered = std::thread::scope(|scope| -> Result<u32> {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    for kind in [0x0806, 0x88b5, 0x0800] {
                        if raw.send(&frame(ALL, its, kind, &arp)).is_ok() {
                            sent.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                    std::thread::sleep(Duration::from_micros(200));
                }
            });
            let mut answered = 0;
            for _ in 0..30 {
                answered += u32::from(victim.ask(&query).is_ok());
            }
            stop.store(true, Ordering::Relaxed);
            Ok(answered)
        })?;
        let sent = sent.load(Ordering::Relaxed);
        ensure!(sent > 100, "only {sent} frames were sent");
        ensure!(answered == 30, "{answered} of 30 answers, {sent} frames");
        eventually("the frames are counted", SOON, || {
            let counted = lab.counted(Reason::SourceMac)?;
            ensure!(counted >= u64::from(sent), "{counted} of {sent}");
            Ok(())
        })
    });
}

/// A frame with MLD reports of groups, about `bytes` long.
fn report(mac: [u8; 6], bytes: usize) -> Vec<u8> {
    let records = bytes / 20;
    let mut rest = vec![0, 0, 0, u8::try_from(records).expect("few")];
    for _ in 0..records {
        rest.extend([4, 0, 0, 0, 0xff, 0x0e]);
        rest.extend(&SECRET[..14]);
    }
    let from = link_local(mac);
    let to: IpAddr = "ff02::16".parse().expect("an address");
    let packet = Packet::new(from, to, icmp(true, 143, &rest));
    packet.hop_limit(1).router_alert().ip()
}

fn link_local(mac: [u8; 6]) -> IpAddr {
    IpAddr::from(shared_maps::endpoint::link_local_of(mac))
}

/// Whether `reader` receives a frame that contains [`SECRET`]'s first bytes.
fn reads(reader: &RawFrames, limit: Duration) -> Result<bool> {
    let end = Instant::now() + limit;
    while let Some(left) = end.checked_duration_since(Instant::now()) {
        let Some(frame) = reader.next(left)? else {
            break;
        };
        if frame.windows(14).any(|part| part == &SECRET[..14]) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Pods that may reach one prefix of the world, by UDP too.
fn one_prefix() -> String {
    let rule = "- toCIDR: [\"203.0.113.10/32\", \"2001:db8:113::a/128\"]\n";
    egress("one", "web", rule)
}

#[test]
fn two_pods_exchange_nothing_in_frames_that_policy_does_not_read() {
    with_lab(|lab| {
        let bridge = Bridge::new(lab, "cni0")?;
        let sender = bridge.add_pod("p", 11)?;
        let reader = bridge.add_pod("q", 12)?;
        lab.write_policy("one.yaml", &one_prefix())?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        for pod in [&sender, &reader] {
            lab.add_endpoint(pod, WEB)?;
        }
        eventually("policy is in force", SOON, || {
            sender.expect_closed(at(web4(12), 80))?;
            sender.expect_open(at(web4(10), 80))
        })?;
        let raw = RawFrames::open(&sender.netns)?;
        let other = RawFrames::open(&reader.netns)?;
        let (own, its) = (raw.mac(), other.mac());
        let arp = request(own, &sender, reader.v4.octets());
        let packed = |v6: bool| {
            let (from, to): (IpAddr, IpAddr) = if v6 {
                (sender.v6.into(), web6(10))
            } else {
                (sender.v4.into(), web4(10))
            };
            let mut packet = Packet::new(from, to, udp(4000, 9)).ip();
            packet.extend(SECRET);
            // The length in the IP header includes the payload.
            let length = u16::try_from(packet.len()).expect("short");
            if v6 {
                packet[4..6].copy_from_slice(&(length - 40).to_be_bytes());
            } else {
                packet[2..4].copy_from_slice(&length.to_be_bytes());
            }
            packet
        };
        let tunnels = [
            (
                "ARP",
                frame(its, own, 0x0806, &[&arp[..], &SECRET.repeat(60)].concat()),
            ),
            (
                "ARP to all",
                frame(ALL, own, 0x0806, &[&arp[..], SECRET].concat()),
            ),
            (
                "MLD",
                frame([0x33, 0x33, 0, 0, 0, 0x16], own, 0x86dd, &report(own, 1280)),
            ),
            ("short MLD", frame(its, own, 0x86dd, &report(own, 40))),
            ("IPv4 at its MAC", frame(its, own, 0x0800, &packed(false))),
            ("IPv6 at its MAC", frame(its, own, 0x86dd, &packed(true))),
            ("IPv4 to all", frame(ALL, own, 0x0800, &packed(false))),
            ("IPv6 to all", frame(ALL, own, 0x86dd, &packed(true))),
            (
                "IPv4 at no one's MAC",
                frame([2, 9, 9, 9, 9, 9], own, 0x0800, &packed(false)),
            ),
            ("another protocol", frame(its, own, 0x88b5, SECRET)),
        ];
        let mut passed = Vec::new();
        for (what, tunnel) in &tunnels {
            for _ in 0..3 {
                raw.send(tunnel).with_context(|| (*what).to_owned())?;
            }
            if reads(&other, Duration::from_millis(300))? {
                passed.push(*what);
            }
        }
        ensure!(passed.is_empty(), "the other pod read: {passed:?}");
        // Frames do arrive: a plain request gets through.
        raw.send(&frame(ALL, own, 0x0806, &arp))?;
        let mut arrived = false;
        let end = Instant::now() + SOON;
        while !arrived && Instant::now() < end {
            let got = other.next(Duration::from_millis(100))?;
            arrived = got.is_some_and(|got| got.get(14..42) == Some(&arp[..]));
        }
        ensure!(arrived, "a request did not arrive");
        Ok(())
    });
}

#[test]
fn pods_of_a_bridge_work_under_the_checks() {
    with_lab(|lab| {
        let bridge = Bridge::new(lab, "cni0")?;
        let pod = bridge.add_pod("p", 11)?;
        let neighbour = bridge.add_pod("q", 12)?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        for pod in [&pod, &neighbour] {
            lab.add_endpoint(pod, CLIENT)?;
        }
        let reasons = [Reason::SourceMac, Reason::Malformed, Reason::SpoofedSource];
        let refused = || -> Result<Vec<u64>> {
            reasons
                .into_iter()
                .map(|reason| lab.counted(reason))
                .collect()
        };
        let before = refused()?;
        // Addresses are resolved again, and duplicate address detection and reports run.
        pod.netns.sysctl(&[
            ("net.ipv6.conf.all.accept_dad", "1"),
            ("net.ipv6.conf.eth0.accept_dad", "1"),
        ])?;
        pod.netns.batch(
            "link set eth0 down\n\
             link set eth0 up\n\
             address replace fd88::b/64 dev eth0\n\
             route replace default via 10.88.0.1\n\
             route replace default via fd88::1",
        )?;
        pod.netns.settled()?;
        for netns in [&pod.netns, &neighbour.netns, &lab.node] {
            netns.batch("neighbour flush all")?;
        }
        for to in [neighbour.v4.into(), neighbour.v6.into(), web4(10), web6(10)] {
            eventually("a ping", SOON, || pod.ping(to, Duration::from_secs(1)))?;
        }
        neighbour.ping(pod.v4.into(), SOON)?;
        ensure!(
            refused()? == before,
            "some message was refused: {:?}",
            refused()?
        );
        Ok(())
    });
}

#[test]
fn a_routed_pod_that_changes_its_mac_is_followed_and_a_bridged_one_is_not() {
    with_lab(|lab| {
        let bridge = Bridge::new(lab, "cni0")?;
        let bridged = bridge.add_pod("p", 11)?;
        let neighbour = bridge.add_pod("q", 12)?;
        let options = AgentOptions::default();
        let agent = lab.start_agent(&options)?;
        for pod in [&lab.a, &bridged, &neighbour] {
            lab.add_endpoint(pod, CLIENT)?;
        }
        let open = at(web4(10), 80);
        lab.a
            .netns
            .batch("link set eth0 address 02:00:00:00:77:01")?;
        eventually("the routed pod works", SOON, || lab.a.expect_open(open))?;
        // The agent does not accept a neighbour's MAC, nor does the next agent.
        let own = RawFrames::open(&bridged.netns)?.mac();
        let its = RawFrames::open(&neighbour.netns)?.mac();
        let set = |mac: [u8; 6]| {
            let text: Vec<String> = mac.iter().map(|byte| format!("{byte:02x}")).collect();
            bridged
                .netns
                .batch(&format!("link set eth0 address {}", text.join(":")))
        };
        set(its)?;
        bridged.expect_closed(open)?;
        agent.kill_9()?;
        let _agent = lab.start_agent(&options)?;
        for _ in 0..3 {
            bridged.expect_closed(open)?;
            neighbour.expect_open(open)?;
        }
        set(own)?;
        eventually("its own MAC works again", SOON, || {
            bridged.expect_open(open)
        })
    });
}
