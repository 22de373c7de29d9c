//! The tunnel between nodes: which packets are wrapped and unwrapped, which are refused, and what the
//! identity in them is worth.
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use agent_datapath::tunnel::TunnelMode;
use anyhow::Result;
use holdfast_e2e::kernel::tunnel::{Fate, Wrapped, with_tunnel};
use holdfast_e2e::kernel::{From, IDENTITY, Kernel, PEER4, POD4, with_kernel};
use holdfast_e2e::packet::{ACK, Packet, SYN, Transport, echo, ethernet, raw, tcp, udp};
use shared_maps::event::Reason;
use shared_maps::policy::{EGRESS, INGRESS};
use shared_maps::tunnel::DEFAULT_PORT;

const TCP: u8 = 6;
const UDP: u8 = 17;
/// A pod of another node, and its identity.
const REMOTE: Ipv4Addr = Ipv4Addr::new(172, 16, 1, 2);
const OF_REMOTE: u32 = 12_345;
/// Pods of this node.
const LOCAL: Ipv4Addr = Ipv4Addr::new(172, 16, 5, 9);
const OWN: Ipv4Addr = Ipv4Addr::new(10, 9, 1, 2);
/// Interface of the pod that sends.
const FROM_POD: u32 = 4242;
const MODES: [TunnelMode; 3] = [TunnelMode::Off, TunnelMode::DecapOnly, TunnelMode::Full];

fn packet(from: Ipv4Addr, to: Ipv4Addr, transport: Transport) -> Packet {
    Packet::new(from.into(), to.into(), transport)
}

/// The packet of the vectors: TCP to port 80 of a local pod.
fn vector() -> Wrapped {
    let inner = packet(REMOTE, LOCAL, tcp(4000, 80, SYN));
    Wrapped::new(REMOTE, LOCAL, OF_REMOTE, &inner)
}

fn is_unwrapped(k: &mut Kernel, what: &str, wrapped: &Wrapped) -> Result<()> {
    let outcome = k.from_net(&wrapped.frame())?;
    assert_eq!(outcome.reason, Some(Reason::Unwrapped), "{what}");
    assert_eq!(outcome.fate, Fate::Passed, "{what}");
    assert_eq!(outcome.frame, ethernet(0x0800, &wrapped.inner), "{what}");
    Ok(())
}

fn is_untouched(k: &mut Kernel, what: &str, frame: &[u8]) -> Result<()> {
    let outcome = k.from_net(frame)?;
    assert_eq!(
        (outcome.fate, outcome.reason),
        (Fate::Passed, None),
        "{what}"
    );
    assert_eq!(outcome.frame, frame, "{what}");
    Ok(())
}

fn is_refused(k: &mut Kernel, what: &str, frame: &[u8], reason: Reason) -> Result<()> {
    let outcome = k.from_net(frame)?;
    assert_eq!(outcome.reason, Some(reason), "{what}");
    assert_eq!(outcome.fate, Fate::Dropped, "{what}");
    Ok(())
}

#[test]
fn tunnel_packets_to_local_pods_are_unwrapped_in_the_modes_that_say_so() {
    for mode in MODES {
        with_tunnel(mode, |k| {
            k.local_pod(LOCAL, 300)?;
            if mode == TunnelMode::Off {
                // Vector: nothing is unwrapped yet.
                return is_untouched(k, "off", &vector().frame());
            }
            // decap-01 and decap-02
            is_unwrapped(k, "vector", &vector())?;
            assert_eq!(
                k.source(REMOTE)?.map(|source| source.identity),
                Some(OF_REMOTE)
            );
            let mut with_options = vector();
            with_options.options = vec![1; 40];
            is_unwrapped(k, "ihl > 5", &with_options)?;
            with_options.options = vec![1; 4];
            is_unwrapped(k, "ihl 6", &with_options)?;
            for (what, transport) in [("UDP", udp(1, 53)), ("ping", echo(false, false, 7))] {
                let inner = packet(REMOTE, LOCAL, transport);
                is_unwrapped(k, what, &Wrapped::new(REMOTE, LOCAL, OF_REMOTE, &inner))?;
            }
            let part = packet(REMOTE, LOCAL, udp(1, 53)).fragment(1480, false, 9);
            is_unwrapped(
                k,
                "an inner fragment",
                &Wrapped::new(REMOTE, LOCAL, 5, &part),
            )?;
            assert_eq!(k.source(REMOTE)?.map(|source| source.identity), Some(5));
            Ok(())
        });
    }
}

#[test]
fn tunnel_leaves_other_packets_from_the_network_alone() {
    with_tunnel(TunnelMode::Full, |k| {
        k.local_pod(LOCAL, 300)?;
        let mut other = vector();
        other.port = 53;
        is_untouched(k, "decap-05", &other.frame())?;
        let mut other = vector();
        other.protocol = TCP;
        is_untouched(k, "decap-06", &other.frame())?;
        let ip = vector().ip();
        is_untouched(k, "decap-07", &ethernet(0x86dd, &ip))?;
        let mut later = vector();
        later.fragment = 0x0010;
        is_untouched(k, "a later fragment has no port", &later.frame())?;
        let away = Ipv4Addr::new(172, 16, 5, 10);
        let inner = packet(REMOTE, away, tcp(4000, 80, SYN));
        let passing = Wrapped::new(REMOTE, away, OF_REMOTE, &inner);
        is_untouched(k, "to a pod of another node", &passing.frame())?;
        k.host_address(away)?;
        is_untouched(k, "to this node", &passing.frame())?;
        let plain = packet(REMOTE, LOCAL, tcp(4000, 80, SYN)).frame();
        is_untouched(k, "plain", &plain)?;
        assert_eq!(k.source(REMOTE)?, None);
        // The kernel's own device would unwrap what is sent to the node.
        let outcome = k.from_tunnel(&plain)?;
        assert_eq!(outcome.reason, Some(Reason::TunnelForged));
        Ok(())
    });
}

#[test]
fn tunnel_packets_that_no_node_sends_are_refused() {
    with_tunnel(TunnelMode::DecapOnly, |k| {
        k.local_pod(LOCAL, 300)?;
        let forged = |k: &mut Kernel, what: &str, wrapped: &Wrapped| {
            is_refused(k, what, &wrapped.frame(), Reason::TunnelForged)
        };
        for vni in [
            0,
            1,
            2,
            3,
            4,
            7,
            8,
            9,
            10,
            102,
            255,
            61_440,
            65_535,
            0x00ff_ffff,
        ] {
            let mut wrapped = vector();
            wrapped.header = shared_maps::tunnel::header(vni);
            // decap-11 is VNI 0.
            forged(k, &format!("VNI {vni}"), &wrapped)?;
        }
        let mut flagless = vector();
        flagless.header[0] = 0;
        forged(k, "decap-13", &flagless)?;
        let mut first = vector();
        first.fragment = 0x2000;
        forged(k, "the first fragment", &first)?;
        let mut arp = vector();
        arp.ether_type = 0x0806;
        forged(k, "ARP inside", &arp)?;
        let mut six = vector();
        six.ether_type = 0x86dd;
        forged(k, "IPv6 inside", &six)?;
        for (what, byte) in [("version", 0x65), ("length of the header", 0x44)] {
            let mut wrapped = vector();
            wrapped.inner[0] = byte;
            forged(k, what, &wrapped)?;
        }
        let other = Ipv4Addr::new(172, 16, 1, 3);
        let mut source = vector();
        source.source = other;
        forged(k, "another source outside", &source)?;
        let inner = packet(REMOTE, OWN, tcp(4000, 80, SYN));
        let destination = Wrapped::new(REMOTE, LOCAL, OF_REMOTE, &inner);
        forged(k, "another destination inside", &destination)?;
        let as_local = |k: &mut Kernel, what| {
            let inner = packet(OWN, LOCAL, tcp(4000, 80, SYN));
            forged(k, what, &Wrapped::new(OWN, LOCAL, OF_REMOTE, &inner))
        };
        k.local_pod(OWN, 301)?;
        as_local(k, "the address of a pod here")?;
        k.host_address(OWN)?;
        as_local(k, "the node's address")?;
        for identity in [1, 6, 7, 0x0200_0001] {
            k.identity(IpAddr::V4(REMOTE), identity)?;
            forged(k, "from a node, which wraps nothing of its own", &vector())?;
        }
        k.identity(IpAddr::V4(REMOTE), 3)?;
        assert_eq!(k.source(REMOTE)?, None, "nothing was noted");
        k.outside_block(Ipv4Addr::new(172, 16, 1, 0), 24)?;
        forged(k, "from the world", &vector())?;
        assert_eq!(k.source(REMOTE)?, None, "nothing was noted");
        Ok(())
    });
}

#[test]
fn tunnel_packets_that_are_cut_short_are_refused() {
    with_tunnel(TunnelMode::Full, |k| {
        k.local_pod(LOCAL, 300)?;
        let whole = vector();
        let full = whole.ip().len();
        // From the UDP header alone to all but the last byte.
        for length in 28..full {
            let mut ip = whole.ip();
            ip.truncate(length);
            let total = u16::try_from(length)?.to_be_bytes();
            ip[2..4].copy_from_slice(&total);
            let frame = ethernet(0x0800, &ip);
            let outcome = k.from_net(&frame)?;
            assert_eq!(outcome.fate, Fate::Dropped, "{length} of {full} bytes");
            assert_eq!(
                outcome.reason,
                Some(Reason::Malformed),
                "{length} of {full} bytes"
            );
        }
        assert_eq!(k.source(REMOTE)?, None, "nothing was noted");
        // The stack drops what its own header calls too short.
        let mut frame = whole.frame();
        frame.truncate(14 + 24);
        is_untouched(k, "not even ports", &frame)?;
        // A frame may be longer than its packet.
        let mut padded = whole.frame();
        padded.extend([0; 6]);
        let outcome = k.from_net(&padded)?;
        assert_eq!(outcome.reason, Some(Reason::Unwrapped));
        Ok(())
    });
}

#[test]
fn tunnel_wraps_packets_to_pods_of_other_nodes_and_no_others() {
    let ten = (Ipv4Addr::new(10, 0, 0, 0), 8);
    let world = [
        (Ipv4Addr::new(8, 8, 8, 0), 24),
        (Ipv4Addr::new(192, 0, 2, 0), 24),
        ten,
    ];
    let (all, half, one) = (
        [(Ipv4Addr::UNSPECIFIED, 0)],
        [(Ipv4Addr::new(192, 0, 2, 0), 25)],
        [(Ipv4Addr::new(172, 16, 7, 7), 32)],
    );
    let full = TunnelMode::Full;
    type Case<'a> = (
        &'a str,
        TunnelMode,
        [u8; 4],
        bool,
        &'a [(Ipv4Addr, u8)],
        bool,
    );
    let cases: [Case<'_>; 12] = [
        ("encap-01", full, [172, 16, 5, 9], false, &world, true),
        ("encap-02", full, [8, 8, 8, 8], false, &world, false),
        ("encap-03", full, [172, 16, 1, 2], true, &world, false),
        ("encap-05", full, [10, 255, 255, 255], false, &world, false),
        ("encap-07", full, [8, 8, 9, 1], false, &[], true),
        (
            "encap-08",
            TunnelMode::DecapOnly,
            [172, 16, 5, 9],
            false,
            &world,
            false,
        ),
        (
            "encap-10",
            TunnelMode::Off,
            [172, 16, 5, 9],
            false,
            &[],
            false,
        ),
        ("encap-12", full, [192, 0, 2, 127], false, &half, false),
        (
            "behind encap-12",
            full,
            [192, 0, 2, 128],
            false,
            &half,
            true,
        ),
        ("encap-13", full, [172, 16, 1, 2], true, &all, false),
        ("encap-14", full, [172, 16, 7, 7], false, &one, false),
        ("beside encap-14", full, [172, 16, 7, 8], false, &one, true),
    ];
    for (what, mode, to, is_local, blocks, is_wrapped) in cases {
        with_tunnel(mode, |k| {
            let to = Ipv4Addr::from(to);
            k.local_pod(OWN, IDENTITY.0)?;
            if is_local {
                k.local_pod(to, 300)?;
            }
            for (ip, len) in blocks {
                k.outside_block(*ip, *len)?;
            }
            for transport in [
                tcp(4000, 80, SYN),
                udp(4000, 53),
                echo(false, false, 7),
                raw(47, &[0; 9]),
            ] {
                let frame = packet(OWN, to, transport).frame();
                let outcome = k.to_net(&frame, FROM_POD)?;
                let expected = match is_wrapped {
                    true => (Fate::Wrapped, Some(Reason::Wrapped)),
                    false => (Fate::Passed, None),
                };
                assert_eq!((outcome.fate, outcome.reason), expected, "{what}");
                assert_eq!(outcome.frame, frame, "{what}");
            }
            Ok(())
        });
    }
}

#[test]
fn tunnel_wraps_nothing_of_nodes_to_nodes_or_to_groups() {
    with_tunnel(TunnelMode::Full, |k| {
        k.local_pod(OWN, IDENTITY.0)?;
        let plain = |k: &mut Kernel, what: &str, frame: &[u8]| -> Result<()> {
            let outcome = k.to_net(frame, FROM_POD)?;
            assert_eq!(
                (outcome.fate, outcome.reason),
                (Fate::Passed, None),
                "{what}"
            );
            Ok(())
        };
        let to = |address: Ipv4Addr| packet(OWN, address, tcp(4000, 80, SYN)).frame();
        for address in [
            [224, 0, 0, 5],
            [255; 4],
            [169, 254, 169, 254],
            [127, 0, 0, 1],
            [0, 0, 0, 1],
        ] {
            plain(k, &format!("{address:?}"), &to(address.into()))?;
        }
        let mut broadcast = to(REMOTE);
        broadcast[..6].copy_from_slice(&[0xff; 6]);
        plain(k, "a frame for all", &broadcast)?;
        for (what, identity) in [
            ("node", 1),
            ("remote node", 6),
            ("API server", 7),
            ("scope", 0x0200_0001),
        ] {
            k.identity(IpAddr::V4(REMOTE), identity)?;
            plain(k, what, &to(REMOTE))?;
        }
        // A block that a policy names is no reason.
        for identity in [3, 256, 0x0100_0001] {
            k.identity(IpAddr::V4(REMOTE), identity)?;
            assert_eq!(
                k.to_net(&to(REMOTE), FROM_POD)?.fate,
                Fate::Wrapped,
                "{identity}"
            );
        }
        let unknown = packet(Ipv4Addr::new(10, 9, 1, 77), REMOTE, tcp(4000, 80, SYN));
        plain(k, "an address that no pod here has", &unknown.frame())?;
        let node = Ipv4Addr::new(10, 9, 1, 1);
        k.host_address(node)?;
        plain(
            k,
            "the node",
            &packet(node, REMOTE, tcp(4000, 80, SYN)).frame(),
        )?;
        let six = Packet::new("fd09:1::2".parse()?, "fd09:2::2".parse()?, tcp(1, 2, SYN));
        plain(k, "IPv6", &six.frame())?;
        // What the proxy sends under the pod's address was made here.
        let query = packet(OWN, Ipv4Addr::new(172, 16, 9, 9), udp(4000, 53)).frame();
        assert_eq!(k.to_net(&query, 0)?.reason, Some(Reason::Wrapped));
        Ok(())
    });
}

#[test]
fn tunnel_packets_pass_the_device_once_they_are_wrapped_and_pods_send_none() {
    for mode in MODES {
        with_tunnel(mode, |k| {
            k.local_pod(OWN, IDENTITY.0)?;
            k.allow(0, EGRESS, 0, 0)?;
            let inner = packet(OWN, REMOTE, tcp(4000, 80, SYN));
            let frame = Wrapped::new(OWN, REMOTE, OF_REMOTE, &inner).frame();
            let outcome = k.to_net(&frame, 0)?;
            assert_eq!(
                (outcome.fate, outcome.reason),
                (Fate::Passed, None),
                "of the device"
            );
            // The node translated the port after `from_pod` had seen the packet.
            let outcome = k.to_net(&frame, FROM_POD)?;
            assert_eq!(
                outcome.reason,
                Some(Reason::TunnelPort),
                "of a pod, translated"
            );
            let node = Ipv4Addr::new(10, 9, 1, 1);
            k.host_address(node)?;
            let inner = packet(node, REMOTE, tcp(4000, 80, SYN));
            let masqueraded = Wrapped::new(node, REMOTE, OF_REMOTE, &inner).frame();
            assert_eq!(
                k.to_net(&masqueraded, FROM_POD)?.reason,
                Some(Reason::TunnelPort),
                "of a pod, with the node's address"
            );
            assert_eq!(k.to_net(&masqueraded, 0)?.reason, None, "of the node");
            assert_eq!(k.send(&frame)?.reason, Reason::TunnelPort, "of a pod");
            let first = packet(OWN, REMOTE, udp(1, DEFAULT_PORT)).fragment(0, true, 5);
            let later = packet(OWN, REMOTE, udp(1, DEFAULT_PORT)).fragment(1480, false, 5);
            assert_eq!(
                k.send(&first.frame())?.reason,
                Reason::TunnelPort,
                "in fragments"
            );
            assert!(!k.send(&later.frame())?.pass, "the rest of it");
            for (what, transport) in [
                ("TCP", tcp(4000, DEFAULT_PORT, SYN)),
                ("another port", udp(4000, DEFAULT_PORT + 1)),
                ("from the port", udp(DEFAULT_PORT, 4000)),
            ] {
                let reason = k.send(&packet(OWN, REMOTE, transport).frame())?.reason;
                assert_eq!(reason, Reason::Allowed, "{what}");
            }
            // A server of the Internet may have the port.
            k.outside_block(Ipv4Addr::new(172, 16, 0, 0), 16)?;
            assert_eq!(k.send(&frame)?.reason, Reason::Allowed, "to the world");
            assert_eq!(k.to_net(&frame, FROM_POD)?.reason, None, "to the world");
            Ok(())
        });
    }
    // Without a mode, nothing of it exists.
    with_kernel(|k| {
        k.allow(0, EGRESS, 0, 0)?;
        let frame = packet(OWN, REMOTE, udp(4000, DEFAULT_PORT)).frame();
        assert_eq!(k.send(&frame)?.reason, Reason::Allowed);
        for name in agent_datapath::tunnel::PINS {
            assert!(!k.globals().path(name).exists(), "{name}");
        }
        Ok(())
    });
}

/// The wrapped packet comes in, and the pod gets it.
fn deliver(
    k: &mut Kernel,
    vni: u32,
    from: Ipv4Addr,
    transport: Transport,
    mark: u32,
) -> Result<Reason> {
    let inner = packet(from, OWN, transport);
    let outcome = k.from_net(&Wrapped::new(from, OWN, vni, &inner).frame())?;
    assert_eq!(outcome.reason, Some(Reason::Unwrapped));
    Ok(k.receive(&outcome.frame, From::OutsideMarked(mark))?.reason)
}

#[test]
fn tunnel_senders_are_who_their_node_says_whatever_happens_to_marks() {
    with_tunnel(TunnelMode::DecapOnly, |k| {
        k.local_pod(OWN, IDENTITY.0)?;
        k.allow(OF_REMOTE, INGRESS, TCP, 80)?;
        // Marks of other systems, of our own magics, and one that names the admitted identity.
        for mark in [
            0,
            u32::MAX,
            0x0f00,
            0x0200,
            0x0b00,
            OF_REMOTE << 16 | 0x0f00,
        ] {
            let open = tcp(4000, 80, SYN);
            assert_eq!(
                deliver(k, OF_REMOTE, REMOTE, open.clone(), mark)?,
                Reason::Allowed
            );
            let other = deliver(k, 4242, Ipv4Addr::new(172, 16, 1, 3), open.clone(), mark)?;
            assert_eq!(other, Reason::PolicyDenied, "another pod's identity");
            let plain = packet(Ipv4Addr::new(172, 16, 1, 4), OWN, open).frame();
            let plain = k.receive(&plain, From::OutsideMarked(mark))?;
            assert_eq!(plain.reason, Reason::PolicyDenied, "no identity at all");
        }
        assert_eq!(
            deliver(k, OF_REMOTE, REMOTE, tcp(4000, 81, SYN), 0)?,
            Reason::PolicyDenied
        );
        // What the tunnel says counts more than what the ipcache knows: a pod that got another
        // one's address.
        assert_eq!(
            deliver(k, 4242, REMOTE, tcp(4001, 80, SYN), 0)?,
            Reason::PolicyDenied
        );
        let IpAddr::V4(peer) = PEER4 else {
            unreachable!()
        };
        assert_eq!(
            deliver(k, OF_REMOTE, peer, tcp(4001, 80, SYN), 0)?,
            Reason::Allowed
        );
        Ok(())
    });
}

#[test]
fn tunnel_sources_age() {
    with_tunnel(TunnelMode::Full, |k| {
        k.local_pod(OWN, IDENTITY.0)?;
        k.allow(OF_REMOTE, INGRESS, UDP, 53)?;
        assert_eq!(
            deliver(k, OF_REMOTE, REMOTE, udp(4000, 53), 0)?,
            Reason::Allowed
        );
        let plain = packet(REMOTE, OWN, udp(4001, 53)).frame();
        assert_eq!(k.receive(&plain, From::Outside)?.reason, Reason::Allowed);
        std::thread::sleep(Duration::from_millis(2_100));
        assert_eq!(
            k.receive(&plain, From::Outside)?.reason,
            Reason::PolicyDenied
        );
        // The node, and pods of this node, are not in question.
        assert_eq!(k.receive(&plain, From::Local(0))?.reason, Reason::Allowed);
        assert_eq!(
            deliver(k, OF_REMOTE, REMOTE, udp(4001, 53), 0)?,
            Reason::Allowed
        );
        Ok(())
    });
}

#[test]
fn tunnel_replies_belong_to_the_identity_that_opened_the_connection() {
    with_tunnel(TunnelMode::Full, |k| {
        k.local_pod(OWN, IDENTITY.0)?;
        k.allow(OF_REMOTE, INGRESS, TCP, 80)?;
        assert_eq!(
            deliver(k, OF_REMOTE, REMOTE, tcp(4000, 80, SYN), 0)?,
            Reason::Allowed
        );
        let reply = Packet::new(POD4, REMOTE.into(), tcp(80, 4000, SYN | ACK)).frame();
        assert_eq!(k.send(&reply)?.reason, Reason::Reply);
        // Long after the last packet of the other side, and judged once more each second.
        std::thread::sleep(Duration::from_millis(2_100));
        let data = Packet::new(POD4, REMOTE.into(), tcp(80, 4000, ACK)).frame();
        assert_eq!(k.send(&data)?.reason, Reason::Reply);
        assert_eq!(k.to_net(&data, FROM_POD)?.reason, Some(Reason::Wrapped));
        let key = shared_maps::policy::PolicyKey::new(OF_REMOTE, INGRESS, TCP, 80, 16);
        k.forget(key)?;
        std::thread::sleep(Duration::from_millis(1_100));
        assert_eq!(k.send(&data)?.reason, Reason::PolicyDenied);
        Ok(())
    });
}

#[test]
fn tunnel_sources_count_only_where_packets_are_unwrapped() {
    with_tunnel(TunnelMode::DecapOnly, |k| {
        k.local_pod(OWN, IDENTITY.0)?;
        let open = tcp(4000, 80, SYN);
        assert_eq!(
            deliver(k, OF_REMOTE, REMOTE, open, 0)?,
            Reason::PolicyDenied
        );
        // A source that became an address of this node is the node, not who it was.
        k.allow(OF_REMOTE, INGRESS, TCP, 80)?;
        k.host_address(REMOTE)?;
        let plain = packet(REMOTE, OWN, tcp(4000, 80, SYN)).frame();
        assert_eq!(
            k.receive(&plain, From::Outside)?.reason,
            Reason::PolicyDenied
        );
        Ok(())
    });
}
