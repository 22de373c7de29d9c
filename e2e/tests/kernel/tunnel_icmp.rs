//! ICMP about packets of the tunnel: the reply to a packet of a pod that is too long, and errors of routers.
use std::net::Ipv4Addr;

use agent_datapath::tunnel::TunnelMode;
use anyhow::{Context as _, Result};
use holdfast_e2e::kernel::tunnel::{Fate, MTU, Wrapped, checksum, with_tunnel};
use holdfast_e2e::kernel::{From, IDENTITY, Kernel};
use holdfast_e2e::packet::{ACK, Packet, SYN, ethernet, icmp, raw, tcp, udp};
use shared_maps::event::Reason;
use shared_maps::policy::EGRESS;

const OWN: Ipv4Addr = Ipv4Addr::new(10, 9, 1, 2);
const REMOTE: Ipv4Addr = Ipv4Addr::new(172, 16, 1, 2);
const ROUTER: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
const FITS: usize = MTU as usize - 50;

/// A packet of the pod whose IP part has `length` bytes.
fn of_length(to: Ipv4Addr, length: usize) -> Packet {
    Packet::new(OWN.into(), to.into(), raw(17, &datagram(length - 20)))
}

fn datagram(length: usize) -> Vec<u8> {
    let mut bytes = vec![0x0f, 0xa0, 0, 80];
    bytes.extend(u16::try_from(length).expect("short").to_be_bytes());
    bytes.resize(length, 0);
    bytes
}

#[test]
fn tunnel_tells_pods_which_length_fits() {
    with_tunnel(TunnelMode::Full, |k| {
        k.local_pod(OWN, IDENTITY.0)?;
        k.allow(0, EGRESS, 0, 0)?;
        let fits = of_length(REMOTE, FITS).frame();
        assert_eq!(k.send(&fits)?.reason, Reason::Allowed);
        let long = of_length(REMOTE, FITS + 1);
        let (reason, reply) = k.send_denied(&long.frame())?;
        assert_eq!(reason, Reason::TooBig);
        let reply = reply.context("the pod gets no reply")?;
        let ip = &reply[14..];
        assert_eq!(ip.len(), 20 + 8 + 28);
        assert_eq!(checksum(&ip[..20]), 0, "the IP header's sum");
        assert_eq!(checksum(&ip[20..]), 0, "the message's sum");
        assert_eq!(ip[12..16], REMOTE.octets());
        assert_eq!(ip[16..20], OWN.octets());
        assert_eq!(ip[20..22], [3, 4]);
        assert_eq!(usize::from(u16::from_be_bytes([ip[26], ip[27]])), FITS);
        assert_eq!(ip[28..], long.ip()[..28], "the quote");
        Ok(())
    });
}

#[test]
fn tunnel_lets_long_packets_pass_that_are_not_wrapped() {
    for mode in [TunnelMode::Off, TunnelMode::DecapOnly] {
        with_tunnel(mode, |k| {
            k.allow(0, EGRESS, 0, 0)?;
            assert_eq!(
                k.send(&of_length(REMOTE, 1500).frame())?.reason,
                Reason::Allowed
            );
            Ok(())
        });
    }
    with_tunnel(TunnelMode::Full, |k| {
        k.allow(0, EGRESS, 0, 0)?;
        let long = |k: &mut Kernel, to| {
            Ok::<_, anyhow::Error>(k.send(&of_length(to, 1500).frame())?.reason)
        };
        let node = Ipv4Addr::new(172, 16, 2, 1);
        k.identity(node.into(), 6)?;
        assert_eq!(long(k, node)?, Reason::Allowed, "a node");
        let here = Ipv4Addr::new(172, 16, 2, 2);
        k.local_pod(here, 300)?;
        assert_eq!(long(k, here)?, Reason::Allowed, "a pod of this node");
        k.outside_block(Ipv4Addr::new(172, 16, 3, 0), 24)?;
        assert_eq!(
            long(k, Ipv4Addr::new(172, 16, 3, 9))?,
            Reason::Allowed,
            "the world"
        );
        // Fragments: the first is answered, and the rest is dropped with it.
        let part = of_length(REMOTE, 1500);
        let (reason, reply) = k.send_denied(&part.clone().fragment(0, true, 3).frame())?;
        assert!(reason == Reason::TooBig && reply.is_some(), "{reason:?}");
        let (reason, reply) = k.send_denied(&part.fragment(1480, true, 3).frame())?;
        assert!(reason == Reason::TooBig && reply.is_none(), "{reason:?}");
        // Errors never cause errors.
        let error = Packet::new(OWN.into(), REMOTE.into(), icmp(false, 0, &[0; 1472]));
        let (reason, reply) = k.send_denied(&error.frame())?;
        assert!(reason == Reason::TooBig && reply.is_none(), "{reason:?}");
        // A packet that policy denies is denied.
        k.forget(shared_maps::policy::PolicyKey::new(0, EGRESS, 0, 0, 0))?;
        assert_eq!(long(k, REMOTE)?, Reason::PolicyDenied);
        Ok(())
    });
}

/// What a router says about a packet, quoting `quote`.
fn error(kind: u8, code: u8, mtu: u16, quote: &[u8]) -> Vec<u8> {
    let mut message = vec![kind, code, 0, 0, 0, 0];
    message.extend(mtu.to_be_bytes());
    message.extend(quote);
    let sum = checksum(&message).to_be_bytes();
    message[2..4].copy_from_slice(&sum);
    let mut ip = Packet::new(ROUTER.into(), OWN.into(), raw(1, &message)).ip();
    let sum = checksum(&ip[..20]).to_be_bytes();
    ip[10..12].copy_from_slice(&sum);
    ethernet(0x0800, &ip)
}

#[test]
fn tunnel_errors_of_routers_become_errors_about_the_pods_packet() {
    with_tunnel(TunnelMode::Full, |k| {
        k.local_pod(OWN, IDENTITY.0)?;
        k.allow(0, EGRESS, 0, 0)?;
        let sent = Packet::new(OWN.into(), REMOTE.into(), tcp(4000, 80, SYN));
        assert_eq!(k.send(&sent.frame())?.reason, Reason::Allowed);
        let wrapped = Wrapped::new(OWN, REMOTE, IDENTITY.0, &sent).ip();
        let quotes = [wrapped.len(), 50 + 28, 50 + 29];
        for (kind, code, mtu, told) in [
            (3, 4, 1400, 1350),
            (3, 4, 0, 0),
            (3, 4, 50, 50),
            (11, 0, 0, 0),
            (3, 1, 0, 0),
        ] {
            for length in quotes {
                let what = format!("type {kind}, code {code}, MTU {mtu}, {length} bytes");
                let frame = error(kind, code, mtu, &wrapped[..length]);
                let outcome = k.from_net(&frame)?;
                assert_eq!(
                    (outcome.fate, outcome.reason),
                    (Fate::Passed, None),
                    "{what}"
                );
                let ip = &outcome.frame[14..];
                assert_eq!(ip.len(), 28 + length - 50, "{what}");
                assert_eq!(
                    usize::from(u16::from_be_bytes([ip[2], ip[3]])),
                    ip.len(),
                    "{what}"
                );
                assert_eq!(checksum(&ip[..20]), 0, "the IP header's sum: {what}");
                assert_eq!(checksum(&ip[20..]), 0, "the message's sum: {what}");
                assert_eq!(ip[20..22], [kind, code], "{what}");
                assert_eq!(u16::from_be_bytes([ip[26], ip[27]]), told, "{what}");
                assert_eq!(ip[28..], sent.ip()[..length - 50], "{what}");
                let got = k.receive(&outcome.frame, From::Outside)?;
                assert_eq!(got.reason, Reason::Reply, "{what}");
            }
        }
        Ok(())
    });
}

#[test]
fn tunnel_errors_about_anything_else_stay_as_they_are() {
    with_tunnel(TunnelMode::DecapOnly, |k| {
        k.local_pod(OWN, IDENTITY.0)?;
        let sent = Packet::new(OWN.into(), REMOTE.into(), tcp(4000, 80, ACK));
        let wrapped = Wrapped::new(OWN, REMOTE, IDENTITY.0, &sent);
        let untouched = |k: &mut Kernel, what: &str, quote: &[u8]| -> Result<()> {
            let frame = error(3, 4, 1400, quote);
            assert_eq!(k.from_net(&frame)?.frame, frame, "{what}");
            Ok(())
        };
        untouched(k, "the pod's own packet", &sent.ip())?;
        for length in [28, 36, 50, 69] {
            untouched(k, "too little of it", &wrapped.ip()[..length])?;
        }
        let plain = Packet::new(OWN.into(), REMOTE.into(), udp(1, 53));
        untouched(k, "another datagram", &plain.ip())?;
        let mut other = wrapped.clone();
        other.source = Ipv4Addr::new(10, 9, 1, 3);
        untouched(k, "another pod's packet", &other.ip())?;
        let mut other = wrapped.clone();
        other.destination = Ipv4Addr::new(172, 16, 1, 3);
        untouched(k, "other addresses inside", &other.ip())?;
        let mut other = wrapped.clone();
        other.header[0] = 0;
        untouched(k, "no VNI", &other.ip())?;
        let mut other = wrapped.clone();
        other.options = vec![1; 4];
        untouched(k, "options outside", &other.ip())?;
        // To an address that no pod here has.
        let frame = error(3, 4, 1400, &wrapped.ip());
        let mut elsewhere = frame.clone();
        elsewhere[14 + 19] = 99;
        assert_eq!(k.from_net(&elsewhere)?.frame, elsewhere);
        // Extensions (RFC 4884) would be cut in two.
        let mut extended = frame;
        extended[14 + 20 + 5] = 17;
        assert_eq!(k.from_net(&extended)?.frame, extended);
        Ok(())
    });
}
