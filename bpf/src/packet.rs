//! Parsing: Ethernet payload, IPv4 with options, IPv6 with extension headers, ports.

use aya_ebpf::programs::TcContext;
use shared_maps::{FAMILY_IPV4, FAMILY_IPV6, event::Reason};

use crate::{address::Address, words};

pub(crate) const ETH_LEN: u32 = 14;
pub(crate) const ETH_P_IP: u16 = 0x0800;
pub(crate) const ETH_P_ARP: u16 = 0x0806;
pub(crate) const ETH_P_IPV6: u16 = 0x86dd;

pub(crate) const ICMP: u8 = 1;
pub(crate) const TCP: u8 = 6;
pub(crate) const UDP: u8 = 17;
pub(crate) const ICMPV6: u8 = 58;
const SCTP: u8 = 132;
const UDP_LITE: u8 = 136;

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const DESTINATION_OPTIONS: u8 = 60;
/// Maximum number of extension headers in a packet. A longer chain is malformed.
const MAX_EXTENSIONS: u32 = 8;

pub(crate) const TCP_FIN: u8 = 0x01;
pub(crate) const TCP_SYN: u8 = 0x02;
pub(crate) const TCP_RST: u8 = 0x04;
pub(crate) const TCP_ACK: u8 = 0x10;

/// Place of a packet in a fragmented datagram.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Fragment {
    None = 0,
    /// The first: has the ports.
    First = 1,
    /// Not the first: has no ports.
    Later = 2,
}

/// The parsed fields of a packet. Ports are in network order, as in the packet.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(crate) struct Packet {
    pub(crate) saddr: Address,
    pub(crate) daddr: Address,
    /// Offset of the transport header.
    pub(crate) l4: u32,
    pub(crate) len: u32,
    pub(crate) fragment_id: u32,
    pub(crate) sport: u16,
    pub(crate) dport: u16,
    pub(crate) family: u8,
    pub(crate) protocol: u8,
    pub(crate) tcp_flags: u8,
    pub(crate) icmp_type: u8,
    pub(crate) hop_limit: u8,
    pub(crate) fragment: Fragment,
}

impl Packet {
    /// Clears the fields of the previous packet.
    #[inline(always)]
    pub(crate) fn reset(&mut self, len: u32) {
        // SAFETY: zero is a valid value of every field; of `fragment` it is `Fragment::None`.
        unsafe { words::zero(self) };
        self.len = len;
    }

    #[inline(always)]
    pub(crate) fn is_icmp(&self) -> bool {
        (self.family == FAMILY_IPV4 && self.protocol == ICMP)
            || (self.family == FAMILY_IPV6 && self.protocol == ICMPV6)
    }

    /// Whether the protocol is UDP or TCP. Only these are redirected.
    #[inline(always)]
    pub(crate) fn is_redirectable(&self) -> bool {
        self.protocol == TCP || self.protocol == UDP
    }

    /// First segment of a TCP connection.
    #[inline(always)]
    pub(crate) fn is_syn(&self) -> bool {
        self.protocol == TCP && self.tcp_flags & (TCP_SYN | TCP_ACK) == TCP_SYN
    }

    /// Destination port in the form of policy entries. For ICMP it is the type, in the low byte.
    #[inline(always)]
    pub(crate) fn policy_port(&self) -> u16 {
        if self.is_icmp() {
            u16::from(self.icmp_type).to_be()
        } else {
            self.dport
        }
    }

    /// Destination port, in the form of policy entries, of the packet that this one replies to.
    #[inline(always)]
    pub(crate) fn port_of_opposite(&self) -> u16 {
        if !self.is_icmp() {
            return self.sport;
        }
        // Echo, timestamp, information, address mask; echo, node information.
        let asked = match (self.family, self.icmp_type) {
            (FAMILY_IPV4, 0) => 8,
            (FAMILY_IPV4, 14 | 16 | 18) | (FAMILY_IPV6, 129 | 140) => self.icmp_type - 1,
            (_, other) => other,
        };
        u16::from(asked).to_be()
    }
}

/// Loads a value at `offset`. A packet that is too short is malformed.
#[inline(always)]
pub(crate) fn load<T>(ctx: &TcContext, offset: u32) -> Result<T, Reason> {
    ctx.load(offset as usize).map_err(|_| Reason::Malformed)
}

/// The addresses of an Ethernet frame, packed as [`shared_maps::lxc::pack_mac`] does.
#[derive(Clone, Copy)]
pub(crate) struct Frame {
    pub(crate) to: u64,
    pub(crate) from: u64,
}

/// The MAC of all machines.
pub(crate) const BROADCAST: u64 = 0xffff_ffff_ffff;

impl Frame {
    /// Reads the frame's header, which the kernel keeps in one piece with the start of the packet.
    #[inline(always)]
    pub(crate) fn of(ctx: &TcContext) -> Result<Self, Reason> {
        let start = ctx.data();
        if start + ETH_LEN as usize > ctx.data_end() {
            return Err(Reason::Malformed);
        }
        let words = start as *const u16;
        // SAFETY: the frame is as long as was checked. The kernel aligns it to 16 bits.
        let word = |at| u64::from(unsafe { words.add(at).read() });
        Ok(Self {
            to: word(0) | word(1) << 16 | word(2) << 32,
            from: word(3) | word(4) << 16 | word(5) << 32,
        })
    }

    /// Whether the frame is for a group of machines, or for all.
    #[inline(always)]
    pub(crate) fn is_to_group(self) -> bool {
        self.to & 1 != 0
    }
}

/// EtherType, or `UnknownProtocol` for a VLAN-tagged packet.
#[inline(always)]
pub(crate) fn ether_type(ctx: &TcContext) -> Result<u16, Reason> {
    // SAFETY: the context is valid for the run of the program.
    let (tagged, protocol) = unsafe { ((*ctx.skb.skb).vlan_present, (*ctx.skb.skb).protocol) };
    if tagged != 0 {
        return Err(Reason::UnknownProtocol);
    }
    Ok(u16::from_be(protocol as u16))
}

/// Reads the IP packet at `offset` into `packet`. If `quoted`, it is the start of a packet within
/// an ICMP error: lengths are not checked, and only the first 8 bytes of the transport header are
/// present.
#[inline(never)]
pub(crate) fn parse_ip(
    ctx: &TcContext,
    offset: u32,
    family: u8,
    quoted: bool,
    packet: &mut Packet,
) -> Result<(), Reason> {
    packet.family = family;
    if family == FAMILY_IPV4 {
        parse_v4(ctx, offset, quoted, packet)?;
    } else {
        parse_v6(ctx, offset, packet)?;
    }
    if packet.fragment == Fragment::Later {
        return Ok(());
    }
    parse_transport(ctx, quoted, packet)
}

#[inline(always)]
fn parse_v4(ctx: &TcContext, offset: u32, quoted: bool, packet: &mut Packet) -> Result<(), Reason> {
    let header: [u8; 20] = load(ctx, offset)?;
    let header_len = u32::from(header[0] & 0x0f) * 4;
    if header[0] >> 4 != 4 || header_len < 20 {
        return Err(Reason::Malformed);
    }
    let total = u32::from(u16::from_be_bytes([header[2], header[3]]));
    // The stack writes a total length of zero into segments above 64 KiB (BIG TCP).
    if !quoted && total != 0 && (total < header_len || offset + total > packet.len) {
        return Err(Reason::Malformed);
    }
    let flags = u16::from_be_bytes([header[6], header[7]]);
    packet.fragment = if flags & 0x1fff != 0 {
        Fragment::Later
    } else if flags & 0x2000 != 0 {
        Fragment::First
    } else {
        Fragment::None
    };
    packet.fragment_id = u32::from(u16::from_ne_bytes([header[4], header[5]]));
    packet.hop_limit = header[8];
    packet.protocol = header[9];
    // The other words are zero since `reset`.
    let word = |at: usize| {
        u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
    };
    packet.saddr.0[0] = word(12);
    packet.daddr.0[0] = word(16);
    packet.l4 = offset + header_len;
    Ok(())
}

#[inline(always)]
fn parse_v6(ctx: &TcContext, offset: u32, packet: &mut Packet) -> Result<(), Reason> {
    let start: [u8; 8] = load(ctx, offset)?;
    if start[0] >> 4 != 6 {
        return Err(Reason::Malformed);
    }
    packet.hop_limit = start[7];
    packet.saddr = Address(load(ctx, offset + 8)?);
    packet.daddr = Address(load(ctx, offset + 24)?);
    let mut next = start[6];
    let mut at = offset + 40;
    for _ in 0..MAX_EXTENSIONS {
        match next {
            HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS => {
                let [n, len]: [u8; 2] = load(ctx, at)?;
                next = n;
                at += (u32::from(len) + 1) * 8;
            }
            AUTHENTICATION => {
                let [n, len]: [u8; 2] = load(ctx, at)?;
                next = n;
                at += (u32::from(len) + 2) * 4;
            }
            FRAGMENT => {
                let words: [u32; 2] = load(ctx, at)?;
                let head = u32::from_be(words[0]);
                packet.fragment_id = words[1];
                next = (head >> 24) as u8;
                at += 8;
                if head & 0xfff8 != 0 {
                    packet.fragment = Fragment::Later;
                    packet.protocol = next;
                    packet.l4 = at;
                    return Ok(());
                }
                if head & 1 != 0 {
                    packet.fragment = Fragment::First;
                }
            }
            _ => {
                packet.protocol = next;
                packet.l4 = at;
                return Ok(());
            }
        }
    }
    Err(Reason::Malformed)
}

#[inline(always)]
fn parse_transport(ctx: &TcContext, quoted: bool, packet: &mut Packet) -> Result<(), Reason> {
    match packet.protocol {
        TCP | UDP | SCTP | UDP_LITE => {
            [packet.sport, packet.dport] = load(ctx, packet.l4)?;
            if packet.protocol == TCP && !quoted {
                packet.tcp_flags = load(ctx, packet.l4 + 13)?;
            }
        }
        ICMP | ICMPV6 => {
            let [kind, _code, _, _, id0, id1]: [u8; 6] = load(ctx, packet.l4)?;
            packet.icmp_type = kind;
            let id = u16::from_ne_bytes([id0, id1]);
            // Echo: the identifier takes the place of the client's port, so that request and reply
            // belong to one connection.
            match (packet.protocol, kind) {
                (ICMP, 8) | (ICMPV6, 128) => packet.sport = id,
                (ICMP, 0) | (ICMPV6, 129) => packet.dport = id,
                _ => {}
            }
        }
        _ => {}
    }
    Ok(())
}
