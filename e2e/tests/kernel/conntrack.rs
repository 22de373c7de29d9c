//! Connection entries: layout, lifetimes, states.
use anyhow::{Context as _, Result};
use holdfast_e2e::kernel::{From, IDENTITY, Kernel, PEER, PEER4, PEER6, POD4, POD6, with_kernel};
use holdfast_e2e::packet::{ACK, FIN, Packet, RST, SYN, Transport, tcp, udp};
use shared_maps::Be16;
use shared_maps::conntrack::{
    CtKey4, CtKey6, CtValue, DIR_IN, DIR_OUT, FLAG_ANSWERED, FLAG_RX_CLOSING, FLAG_SEEN_NON_SYN,
    FLAG_TX_CLOSING, LIFETIME_ANY, LIFETIME_CLOSE, LIFETIME_SYN, LIFETIME_TCP,
};
use shared_maps::event::Reason;
use shared_maps::policy::{EGRESS, INGRESS};
use shared_maps::user::monotonic_ns;

const TCP: u8 = 6;
const UDP: u8 = 17;

fn out(transport: Transport) -> Vec<u8> {
    Packet::new(POD4, PEER4, transport).frame()
}

fn back(transport: Transport) -> Vec<u8> {
    Packet::new(PEER4, POD4, transport).frame()
}

fn key4(protocol: u8, sport: u16, dport: u16) -> CtKey4 {
    CtKey4 {
        daddr: [10, 9, 1, 2],
        saddr: [192, 0, 2, 53],
        dport: Be16::new(dport),
        sport: Be16::new(sport),
        nexthdr: protocol,
        flags: DIR_OUT,
    }
}

fn entry(k: &Kernel, protocol: u8, sport: u16, dport: u16) -> Result<CtValue> {
    k.conntrack4(protocol == TCP)?
        .get(&key4(protocol, sport, dport))?
        .context("no connection entry")
}

/// Whether `expected` seconds are left, with a tolerance for the time that passes in between.
fn lives(value: &CtValue, expected: u32) -> bool {
    let now = u32::try_from(monotonic_ns() / 1_000_000_000).expect("seconds since boot fit");
    let left = value.lifetime - now;
    left == expected || left + 1 == expected || left + 2 == expected
}

#[test]
fn keys_have_cilium_s_order() {
    with_kernel(|k| {
        k.allow(PEER, EGRESS, 0, 0)?;
        k.allow(PEER, INGRESS, 0, 0)?;
        k.send(&out(udp(4000, 80)))?;
        let value = entry(k, UDP, 4000, 80)?;
        assert_eq!(value.src_sec_id, IDENTITY.0);
        assert_eq!(value.packets, 1);
        assert_eq!(value.bytes, 14 + 20 + 16);

        let frame = Packet::new(PEER4, POD4, udp(5000, 90)).frame();
        k.receive(&frame, From::Outside)?;
        let incoming = CtKey4 {
            daddr: [192, 0, 2, 53],
            saddr: [10, 9, 1, 2],
            dport: Be16::new(90),
            sport: Be16::new(5000),
            nexthdr: UDP,
            flags: DIR_IN,
        };
        let value = k.conntrack4(false)?.get(&incoming)?.context("no entry")?;
        assert_eq!(value.src_sec_id, PEER);

        k.send(&Packet::new(POD6, PEER6, tcp(4000, 80, SYN)).frame())?;
        let (std::net::IpAddr::V6(pod), std::net::IpAddr::V6(peer)) = (POD6, PEER6) else {
            unreachable!("IPv6")
        };
        let key = CtKey6 {
            daddr: pod.octets(),
            saddr: peer.octets(),
            dport: Be16::new(80),
            sport: Be16::new(4000),
            nexthdr: TCP,
            flags: DIR_OUT,
        };
        assert!(k.conntrack6(true)?.get(&key)?.is_some());
        Ok(())
    });
}

#[test]
fn lifetimes_follow_the_state() {
    with_kernel(|k| {
        k.allow(PEER, EGRESS, 0, 0)?;
        k.send(&out(udp(4000, 80)))?;
        assert!(lives(&entry(k, UDP, 4000, 80)?, LIFETIME_ANY));

        k.send(&out(tcp(4000, 80, SYN)))?;
        let opened = entry(k, TCP, 4000, 80)?;
        assert!(lives(&opened, LIFETIME_SYN));
        assert_eq!(opened.flags, 0);
        k.receive(&back(tcp(80, 4000, SYN | ACK)), From::Outside)?;
        assert!(lives(&entry(k, TCP, 4000, 80)?, LIFETIME_SYN));
        k.send(&out(tcp(4000, 80, ACK)))?;
        let established = entry(k, TCP, 4000, 80)?;
        assert!(lives(&established, LIFETIME_TCP));
        assert_eq!(established.flags, FLAG_SEEN_NON_SYN | FLAG_ANSWERED);
        assert_eq!(established.packets, 3);
        assert_eq!(established.tx_flags_seen, SYN | ACK);
        assert_eq!(established.rx_flags_seen, SYN | ACK);

        k.send(&out(tcp(4000, 80, FIN | ACK)))?;
        let half = entry(k, TCP, 4000, 80)?;
        assert!(lives(&half, LIFETIME_TCP), "half closed still carries data");
        assert_eq!(
            half.flags,
            FLAG_SEEN_NON_SYN | FLAG_ANSWERED | FLAG_TX_CLOSING
        );
        k.receive(&back(tcp(80, 4000, FIN | ACK)), From::Outside)?;
        let closed = entry(k, TCP, 4000, 80)?;
        assert!(lives(&closed, LIFETIME_CLOSE));
        assert_ne!(closed.flags & FLAG_RX_CLOSING, 0);

        // The same ports again, before the old entry is removed.
        k.send(&out(tcp(4000, 80, SYN)))?;
        let again = entry(k, TCP, 4000, 80)?;
        assert!(lives(&again, LIFETIME_SYN));
        assert_eq!((again.flags, again.packets), (0, 1));
        k.send(&out(tcp(4000, 80, RST)))?;
        assert!(lives(&entry(k, TCP, 4000, 80)?, LIFETIME_CLOSE));
        Ok(())
    });
}

#[test]
fn an_expired_entry_is_no_connection() {
    with_kernel(|k| {
        k.allow(PEER, EGRESS, UDP, 80)?;
        k.send(&out(udp(4000, 80)))?;
        let reply = back(udp(80, 4000));
        assert!(k.receive(&reply, From::Outside)?.pass);
        let old = entry(k, UDP, 4000, 80)?;
        let expired = CtValue {
            lifetime: u32::try_from(monotonic_ns() / 1_000_000_000)? - 1,
            ..old
        };
        k.conntrack4(false)?.set(&key4(UDP, 4000, 80), &expired)?;
        let late = k.receive(&reply, From::Outside)?;
        assert_eq!((late.pass, late.reason), (false, Reason::PolicyDenied));
        k.send(&out(udp(4000, 80)))?;
        let renewed = entry(k, UDP, 4000, 80)?;
        assert!(lives(&renewed, LIFETIME_ANY));
        assert_eq!(renewed.packets, 1, "a new connection");
        assert!(k.receive(&reply, From::Outside)?.pass);
        Ok(())
    });
}

#[test]
fn dropped_packets_leave_no_entry() {
    with_kernel(|k| {
        k.send(&out(udp(4000, 80)))?;
        k.receive(&back(udp(4000, 80)), From::Outside)?;
        assert!(k.conntrack4(false)?.entries()?.found.is_empty());
        Ok(())
    });
}
