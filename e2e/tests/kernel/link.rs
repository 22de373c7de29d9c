//! Frames of a pod's link: their source, their destination, and the exact form of ARP.
use std::net::IpAddr;

use agent_core::datapath::{attachment::Attachment, link::Link};
use anyhow::Result;
use holdfast_e2e::kernel::{
    From, IFINDEX, Kernel, LINK_LOCAL, MAC, PEER, PEER4, PEER6, POD4, POD6, STRANGER4, STRANGER6,
    attachment, with_kernel,
};
use holdfast_e2e::packet::{Packet, arp, ethernet, icmp, udp};
use shared_maps::event::Reason::{
    self, Allowed, LinkLocal, Malformed, Misaddressed, NotOnLink, SourceMac, SpoofedSource,
    UnknownProtocol,
};
use shared_maps::policy::{EGRESS, INGRESS};

const PORT_MAC: [u8; 6] = [2, 0, 0, 0, 1, 1];
const BRIDGE_MAC: [u8; 6] = [2, 0, 0, 0, 1, 2];
const VICTIM_MAC: [u8; 6] = [2, 0, 0, 0, 1, 3];
const ALL: [u8; 6] = [0xff; 6];
const OWN: [u8; 4] = [10, 9, 1, 2];
const GATEWAY: [u8; 4] = [10, 9, 1, 1];

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn bridged() -> Attachment {
    Attachment {
        gateway_mac: Some(PORT_MAC),
        link: Link {
            bridge_mac: Some(BRIDGE_MAC),
            on_link_bits: 64,
            on_link_bits4: 24,
            ..attachment(IFINDEX).link
        },
        ..attachment(IFINDEX)
    }
}

fn with_source(frame: &[u8], mac: [u8; 6]) -> Vec<u8> {
    let mut frame = frame.to_vec();
    frame[6..12].copy_from_slice(&mac);
    frame
}

fn sent(k: &mut Kernel, what: &str, frame: &[u8], expected: Reason) -> Result<()> {
    assert_eq!(k.send(frame)?.reason, expected, "{what}");
    Ok(())
}

fn received(k: &mut Kernel, what: &str, frame: &[u8], expected: Reason) -> Result<()> {
    let reason = k.receive(frame, From::Outside)?.reason;
    assert_eq!(reason, expected, "{what}");
    Ok(())
}

#[test]
fn a_frame_of_a_pod_has_the_pods_own_mac() {
    let solicitation = {
        let IpAddr::V6(target) = POD6 else {
            unreachable!("IPv6")
        };
        let rest = [&[0; 4], target.octets().as_slice(), &[1, 1], &MAC].concat();
        Packet::new(POD6, ip("ff02::1"), icmp(true, 135, &rest)).hop_limit(255)
    };
    let frames = [
        (
            "IPv4",
            Packet::new(POD4, PEER4, udp(4000, 80)).frame(),
            Allowed,
        ),
        (
            "IPv6",
            Packet::new(POD6, PEER6, udp(4000, 80)).frame(),
            Allowed,
        ),
        ("ARP", arp(MAC, OWN, GATEWAY), LinkLocal),
        ("neighbour discovery", solicitation.frame(), LinkLocal),
    ];
    with_kernel(|k| {
        k.allow(PEER, EGRESS, 0, 0)?;
        for endpoint in [attachment(IFINDEX), bridged()] {
            k.reload(&endpoint)?;
            for (what, frame, own) in &frames {
                sent(k, what, frame, *own)?;
                let changed = [MAC[0], MAC[1], MAC[2], MAC[3], MAC[4], MAC[5] ^ 1];
                for mac in [
                    VICTIM_MAC,
                    PORT_MAC,
                    [0; 6],
                    ALL,
                    [1, 0, 0x5e, 0, 0, 1],
                    changed,
                ] {
                    let what = format!("{what} from {mac:?}");
                    sent(k, &what, &with_source(frame, mac), SourceMac)?;
                }
            }
        }
        // Frames that are not IP do not pass, whatever their MAC is.
        sent(k, "other", &ethernet(0x88b5, &[0; 46]), UnknownProtocol)?;
        // The agent does not know the pod's MAC: any unicast MAC is accepted.
        let mut unknown = bridged();
        unknown.mac = [0; 6];
        k.reload(&unknown)?;
        let (_, frame, _) = &frames[0];
        sent(k, "unknown", &with_source(frame, VICTIM_MAC), Allowed)?;
        sent(k, "unknown", &with_source(frame, ALL), SourceMac)?;
        Ok(())
    });
}

#[test]
fn on_a_bridge_a_packet_for_one_machine_is_not_in_a_frame_for_all() {
    let group4 = [1, 0, 0x5e, 0, 0, 0xfb];
    let group6 = [0x33, 0x33, 0, 0, 0, 0xfb];
    let mail = |to: IpAddr, mac| {
        let from = if to.is_ipv4() { POD4 } else { POD6 };
        Packet::new(from, to, udp(4000, 80)).frame_to(mac)
    };
    // Destination; the MACs of its frames; verdict on a bridge, and on a bridge without an IPv4
    // address.
    let rows = [
        (
            PEER4,
            vec![PORT_MAC, BRIDGE_MAC, VICTIM_MAC],
            Allowed,
            Allowed,
        ),
        (PEER4, vec![ALL, group4, group6], Misaddressed, Misaddressed),
        (
            PEER6,
            vec![PORT_MAC, BRIDGE_MAC, VICTIM_MAC],
            Allowed,
            Allowed,
        ),
        (PEER6, vec![ALL, group6], Misaddressed, Misaddressed),
        (ip("224.0.0.251"), vec![group4], Allowed, Allowed),
        (ip("255.255.255.255"), vec![ALL], Allowed, Allowed),
        (ip("10.9.1.255"), vec![ALL], Allowed, Misaddressed),
        (ip("10.9.2.255"), vec![ALL], Misaddressed, Misaddressed),
        (ip("ff02::fb"), vec![group6], Allowed, Allowed),
    ];
    with_kernel(|k| {
        k.allow(0, EGRESS, 0, 0)?;
        let mut without = bridged();
        without.link.on_link_bits4 = 0;
        for (to, macs, on_bridge, on_bare_bridge) in &rows {
            for mac in macs {
                let what = format!("{to} at {mac:?}");
                for (endpoint, expected) in [
                    (&bridged(), on_bridge),
                    (&without, on_bare_bridge),
                    // The node itself judges what it routes.
                    (&attachment(IFINDEX), &Allowed),
                ] {
                    k.reload(endpoint)?;
                    sent(k, &what, &mail(*to, *mac), *expected)?;
                }
            }
        }
        Ok(())
    });
}

#[test]
fn a_pod_receives_what_is_for_its_own_addresses_and_groups() {
    let own: [&str; 7] = [
        "10.9.1.2",
        "224.0.0.251",
        "255.255.255.255",
        "10.9.1.255",
        "fd09:1::2",
        "fe80::42:aff:fe09:102",
        "ff02::fb",
    ];
    let others = [
        "10.9.1.3",
        "203.0.113.9",
        "10.9.2.255",
        "fd09:1::3",
        "fe80::3",
        "2001:db8::1",
    ];
    with_kernel(|k| {
        k.allow(0, INGRESS, 0, 0)?;
        k.reload(&bridged())?;
        assert_eq!(LINK_LOCAL, ip(own[5]));
        let rows = own.map(|to| (to, Allowed)).into_iter();
        for (to, expected) in rows.chain(others.map(|to| (to, Misaddressed))) {
            let from = if ip(to).is_ipv4() {
                STRANGER4
            } else {
                STRANGER6
            };
            // The frame is for the pod's MAC, because only the address in the packet counts.
            let frame = Packet::new(from, ip(to), udp(4000, 80)).frame_to(MAC);
            received(k, to, &frame, expected)?;
            let reason = k.receive(&frame, From::Local(0))?.reason;
            assert_eq!(reason, expected, "{to}, of the node");
        }
        // No connection of another machine is recorded.
        let entries = k.conntrack4(false)?.entries()?.found;
        assert!(entries.iter().all(|(key, _)| key.saddr != [10, 9, 1, 3]));
        Ok(())
    });
}

/// An ARP packet with each field chosen, in a frame to `to`.
struct Arp {
    to: [u8; 6],
    operation: u8,
    sender_mac: [u8; 6],
    sender: [u8; 4],
    target_mac: [u8; 6],
    target: [u8; 4],
    behind: Vec<u8>,
}

impl Arp {
    fn request() -> Self {
        Self {
            to: ALL,
            operation: 1,
            sender_mac: MAC,
            sender: OWN,
            target_mac: [0; 6],
            target: GATEWAY,
            behind: Vec::new(),
        }
    }

    fn frame(&self) -> Vec<u8> {
        let mut payload = vec![0, 1, 8, 0, 6, 4, 0, self.operation];
        payload.extend(self.sender_mac);
        payload.extend(self.sender);
        payload.extend(self.target_mac);
        payload.extend(self.target);
        payload.extend(&self.behind);
        let mut frame = ethernet(0x0806, &payload);
        frame[..6].copy_from_slice(&self.to);
        frame
    }
}

#[test]
fn arp_of_a_pod_has_no_room_for_anything_else() {
    let request = Arp::request;
    let reply = || Arp {
        to: VICTIM_MAC,
        operation: 2,
        target_mac: VICTIM_MAC,
        target: [10, 9, 1, 3],
        ..Arp::request()
    };
    let rows = [
        ("request", request(), LinkLocal),
        (
            "request of arping",
            Arp {
                target_mac: ALL,
                ..request()
            },
            LinkLocal,
        ),
        (
            "request to one machine",
            Arp {
                to: VICTIM_MAC,
                ..request()
            },
            LinkLocal,
        ),
        ("reply", reply(), LinkLocal),
        (
            "probe",
            Arp {
                sender: [0; 4],
                target: OWN,
                ..request()
            },
            LinkLocal,
        ),
        (
            "announcement",
            Arp {
                target: OWN,
                ..request()
            },
            LinkLocal,
        ),
        (
            "announcement as a reply",
            Arp {
                operation: 2,
                target: OWN,
                target_mac: MAC,
                ..request()
            },
            LinkLocal,
        ),
        (
            "filled up",
            Arp {
                behind: vec![0; 18],
                ..request()
            },
            LinkLocal,
        ),
        (
            "too long",
            Arp {
                behind: vec![0; 19],
                ..request()
            },
            Malformed,
        ),
        (
            "data in the filling",
            Arp {
                behind: vec![0, 0, 7],
                ..request()
            },
            Malformed,
        ),
        (
            "last byte",
            Arp {
                behind: [vec![0; 17], vec![7]].concat(),
                ..request()
            },
            Malformed,
        ),
        (
            "a tunnel",
            Arp {
                behind: vec![7; 1400],
                ..request()
            },
            Malformed,
        ),
        (
            "no operation",
            Arp {
                operation: 0,
                ..request()
            },
            Malformed,
        ),
        (
            "RARP's",
            Arp {
                operation: 3,
                ..request()
            },
            Malformed,
        ),
        (
            "InARP's",
            Arp {
                operation: 8,
                ..request()
            },
            Malformed,
        ),
        (
            "any target MAC",
            Arp {
                target_mac: [9; 6],
                ..request()
            },
            Malformed,
        ),
        (
            "another target MAC",
            Arp {
                target_mac: [9; 6],
                ..reply()
            },
            Malformed,
        ),
        (
            "to a group",
            Arp {
                to: [1, 0, 0x5e, 0, 0, 1],
                ..request()
            },
            Malformed,
        ),
        (
            "reply without an address",
            Arp {
                sender: [0; 4],
                ..reply()
            },
            Malformed,
        ),
        (
            "another's address",
            Arp {
                sender: GATEWAY,
                ..reply()
            },
            SpoofedSource,
        ),
        (
            "another's MAC",
            Arp {
                sender_mac: VICTIM_MAC,
                ..reply()
            },
            SpoofedSource,
        ),
    ];
    with_kernel(|k| {
        for endpoint in [attachment(IFINDEX), bridged()] {
            k.reload(&endpoint)?;
            for (what, arp, expected) in &rows {
                sent(k, what, &arp.frame(), *expected)?;
            }
        }
        Ok(())
    });
}

#[test]
fn arp_to_a_pod_is_about_the_pod_or_for_all() {
    let from = || Arp {
        to: MAC,
        sender_mac: VICTIM_MAC,
        sender: [10, 9, 1, 3],
        target: OWN,
        ..Arp::request()
    };
    let rows = [
        ("request", from(), LinkLocal),
        ("request to all", Arp { to: ALL, ..from() }, LinkLocal),
        (
            "about another, to all",
            Arp {
                to: ALL,
                target: GATEWAY,
                ..from()
            },
            LinkLocal,
        ),
        (
            "announcement",
            Arp {
                to: ALL,
                target: [10, 9, 1, 3],
                ..from()
            },
            LinkLocal,
        ),
        (
            "reply",
            Arp {
                operation: 2,
                target_mac: MAC,
                ..from()
            },
            LinkLocal,
        ),
        (
            "probe of its address",
            Arp {
                to: ALL,
                sender: [0; 4],
                ..from()
            },
            LinkLocal,
        ),
        (
            "answer to its probe",
            Arp {
                operation: 2,
                target: [0; 4],
                ..from()
            },
            LinkLocal,
        ),
        (
            "filled up",
            Arp {
                behind: vec![0; 18],
                ..from()
            },
            LinkLocal,
        ),
        (
            "about another",
            Arp {
                target: GATEWAY,
                ..from()
            },
            Misaddressed,
        ),
        (
            "its own address",
            Arp {
                sender: OWN,
                ..from()
            },
            SpoofedSource,
        ),
        (
            "a tunnel",
            Arp {
                behind: vec![7; 1400],
                ..from()
            },
            Malformed,
        ),
        (
            "data in the filling",
            Arp {
                behind: vec![7; 18],
                ..from()
            },
            Malformed,
        ),
        (
            "no operation",
            Arp {
                operation: 0,
                ..from()
            },
            Malformed,
        ),
    ];
    with_kernel(|k| {
        for endpoint in [attachment(IFINDEX), bridged()] {
            k.reload(&endpoint)?;
            for (what, arp, expected) in &rows {
                received(k, what, &arp.frame(), *expected)?;
            }
        }
        Ok(())
    });
}

#[test]
fn a_neighbour_asks_one_pod_about_that_pod_only() {
    let solicitation = |to: IpAddr, about: &str, reserved: u8| {
        let IpAddr::V6(target) = ip(about) else {
            unreachable!("IPv6")
        };
        let rest = [&[0, 0, 0, reserved], target.octets().as_slice()].concat();
        Packet::new(ip("fd09:1::3"), to, icmp(true, 135, &rest))
            .hop_limit(255)
            .frame()
    };
    let group = ip("ff02::1:ff00:2");
    with_kernel(|k| {
        for (what, frame, expected) in [
            ("it", solicitation(POD6, "fd09:1::2", 0), LinkLocal),
            (
                "it, to a group",
                solicitation(group, "fd09:1::2", 0),
                LinkLocal,
            ),
            (
                "another, to a group",
                solicitation(group, "fd09:1::5:2", 0),
                LinkLocal,
            ),
            ("another", solicitation(POD6, "fd09:1::4", 0), NotOnLink),
            (
                "reserved bytes",
                solicitation(POD6, "fd09:1::2", 1),
                Malformed,
            ),
        ] {
            received(k, what, &frame, expected)?;
        }
        Ok(())
    });
}
