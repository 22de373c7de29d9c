//! Packets for the tables of the kernel tests, byte by byte.

use std::net::IpAddr;

pub const FIN: u8 = 0x01;
pub const SYN: u8 = 0x02;
pub const RST: u8 = 0x04;
pub const ACK: u8 = 0x10;

/// MAC address of the pod's end in the kernel tests.
pub const MAC: [u8; 6] = [0x02, 0x42, 0x0a, 0x09, 0x01, 0x02];

const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const FRAGMENT_HEADER: u8 = 44;
const ICMPV6: u8 = 58;

/// A transport header with its payload.
#[derive(Clone, Debug)]
pub struct Transport {
    protocol: u8,
    bytes: Vec<u8>,
}

/// A UDP datagram with 8 bytes of payload.
pub fn udp(sport: u16, dport: u16) -> Transport {
    let mut bytes = Vec::new();
    for word in [sport, dport, 16, 0] {
        bytes.extend(word.to_be_bytes());
    }
    bytes.extend([0xaa; 8]);
    Transport {
        protocol: UDP,
        bytes,
    }
}

/// A TCP segment without payload.
pub fn tcp(sport: u16, dport: u16, flags: u8) -> Transport {
    let mut bytes = Vec::new();
    bytes.extend(sport.to_be_bytes());
    bytes.extend(dport.to_be_bytes());
    bytes.extend([0; 8]);
    bytes.extend([0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
    Transport {
        protocol: TCP,
        bytes,
    }
}

/// An ICMP message of the packet's family with type `kind` and `rest` from its fifth byte on.
pub fn icmp(v6: bool, kind: u8, rest: &[u8]) -> Transport {
    let mut bytes = vec![kind, 0, 0, 0];
    bytes.extend(rest);
    bytes.resize(bytes.len().max(8), 0);
    Transport {
        protocol: if v6 { ICMPV6 } else { ICMP },
        bytes,
    }
}

/// An echo request or reply.
pub fn echo(v6: bool, reply: bool, id: u16) -> Transport {
    let kind = match (v6, reply) {
        (false, false) => 8,
        (false, true) => 0,
        (true, false) => 128,
        (true, true) => 129,
    };
    let [a, b] = id.to_be_bytes();
    icmp(v6, kind, &[a, b, 0, 1])
}

/// The ICMP or ICMPv6 message "destination unreachable" about `packet`.
pub fn unreachable(packet: &Packet) -> Transport {
    let v6 = packet.src.is_ipv6();
    let mut rest = vec![0; 4];
    rest.extend(packet.ip());
    icmp(v6, if v6 { 1 } else { 3 }, &rest)
}

/// A payload of any IP protocol, without a header made here.
pub fn raw(protocol: u8, bytes: &[u8]) -> Transport {
    Transport {
        protocol,
        bytes: bytes.to_vec(),
    }
}

/// An IP packet that is built byte by byte. Checksums are zero.
#[derive(Clone, Debug)]
pub struct Packet {
    src: IpAddr,
    dst: IpAddr,
    hop_limit: u8,
    extra: Vec<u8>,
    /// IPv6: protocol of the first extension header.
    first: Option<u8>,
    fragment: Option<(u16, bool, u32)>,
    transport: Transport,
}

impl Packet {
    /// From `src` to `dst`, of one family.
    pub fn new(src: IpAddr, dst: IpAddr, transport: Transport) -> Self {
        assert_eq!(src.is_ipv4(), dst.is_ipv4(), "families differ");
        Self {
            src,
            dst,
            hop_limit: 64,
            extra: Vec::new(),
            first: None,
            fragment: None,
            transport,
        }
    }

    /// With another TTL or hop limit.
    #[must_use]
    pub fn hop_limit(mut self, hop_limit: u8) -> Self {
        self.hop_limit = hop_limit;
        self
    }

    /// IPv4: with `options`, a multiple of four bytes.
    #[must_use]
    pub fn options(mut self, options: &[u8]) -> Self {
        assert!(self.src.is_ipv4() && options.len().is_multiple_of(4));
        self.extra = options.to_vec();
        self
    }

    /// IPv6: with `count` extension headers of `kind`, eight bytes each.
    #[must_use]
    pub fn extensions(mut self, kind: u8, count: usize) -> Self {
        assert!(self.src.is_ipv6() && count > 0);
        self.first = Some(kind);
        for left in (0..count).rev() {
            let next = if left == 0 {
                self.transport.protocol
            } else {
                kind
            };
            self.extra.extend([next, 0, 1, 4, 0, 0, 0, 0]);
        }
        self
    }

    /// IPv6: with the hop-by-hop header of MLD messages (RFC 2711).
    #[must_use]
    pub fn router_alert(mut self) -> Self {
        assert!(self.src.is_ipv6() && self.extra.is_empty());
        self.first = Some(0);
        self.extra = vec![self.transport.protocol, 0, 5, 2, 0, 0, 1, 0];
        self
    }

    /// As a fragment: `offset` in bytes, a multiple of eight.
    #[must_use]
    pub fn fragment(mut self, offset: u16, more: bool, id: u32) -> Self {
        assert!(offset.is_multiple_of(8));
        self.fragment = Some((offset, more, id));
        self
    }

    /// Bytes of the packet from its IP header on.
    pub fn ip(&self) -> Vec<u8> {
        match (self.src, self.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                let header = 20 + self.extra.len();
                let total = header + self.transport.bytes.len();
                let mut ip = vec![0x40 | u8::try_from(header / 4).expect("short"), 0];
                ip.extend(u16::try_from(total).expect("short").to_be_bytes());
                let (offset, more, id) = self.fragment.unwrap_or_default();
                ip.extend(u16::try_from(id).expect("16 bits").to_be_bytes());
                let flags = (u16::from(more) << 13) | (offset / 8);
                ip.extend(flags.to_be_bytes());
                ip.extend([self.hop_limit, self.transport.protocol, 0, 0]);
                ip.extend(src.octets());
                ip.extend(dst.octets());
                ip.extend(&self.extra);
                ip.extend(&self.transport.bytes);
                ip
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                let next = self.first.unwrap_or(self.transport.protocol);
                let mut body = Vec::new();
                let mut first = next;
                if let Some((offset, more, id)) = self.fragment {
                    first = FRAGMENT_HEADER;
                    body.extend([next, 0]);
                    body.extend((offset | u16::from(more)).to_be_bytes());
                    body.extend(id.to_be_bytes());
                }
                body.extend(&self.extra);
                body.extend(&self.transport.bytes);
                let mut ip = vec![0x60, 0, 0, 0];
                ip.extend(u16::try_from(body.len()).expect("short").to_be_bytes());
                ip.extend([first, self.hop_limit]);
                ip.extend(src.octets());
                ip.extend(dst.octets());
                ip.extend(body);
                ip
            }
            _ => unreachable!("checked by `new`"),
        }
    }

    /// The packet in an Ethernet frame.
    pub fn frame(&self) -> Vec<u8> {
        ethernet(if self.src.is_ipv4() { 0x0800 } else { 0x86dd }, &self.ip())
    }

    /// The packet in an Ethernet frame to `mac`.
    pub fn frame_to(&self, mac: [u8; 6]) -> Vec<u8> {
        let mut frame = self.frame();
        frame[..6].copy_from_slice(&mac);
        frame
    }
}

/// An Ethernet frame with the MAC of the endpoint under test as its source.
pub fn ethernet(ether_type: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 1];
    frame.extend(MAC);
    frame.extend(ether_type.to_be_bytes());
    frame.extend(payload);
    frame
}

/// An ARP request from `mac` and `sender`.
pub fn arp(mac: [u8; 6], sender: [u8; 4], target: [u8; 4]) -> Vec<u8> {
    let mut payload = vec![0, 1, 8, 0, 6, 4, 0, 1];
    payload.extend(mac);
    payload.extend(sender);
    payload.extend([0; 6]);
    payload.extend(target);
    ethernet(0x0806, &payload)
}
