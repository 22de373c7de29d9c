//! Messages of the link: ARP, neighbour discovery (RFC 4861) and MLD (RFC 3810).
//!
//! Policy does not judge them, so the programs let pass only correct ones:
//! - A pod's messages are about its own addresses only.
//! - They have the hop limit that no routed packet has, and a destination on the link.
//! - Their form has no room for other data.

use aya_ebpf::{
    bindings::bpf_fib_lookup as FibLookup, helpers::bpf_fib_lookup, programs::TcContext,
};
use shared_maps::{
    FAMILY_IPV6,
    event::{FAMILY_ARP, Reason},
    lxc::{FLAG_HOST, LxcKey},
};

use crate::{
    address::Address,
    config,
    maps::LXC,
    packet::{BROADCAST, ETH_LEN, Frame, ICMPV6, Packet, load},
};

const MLD_QUERY: u8 = 130;
const MLD_REPORT: u8 = 131;
const MLD_DONE: u8 = 132;
const ROUTER_SOLICITATION: u8 = 133;
const ROUTER_ADVERTISEMENT: u8 = 134;
const NEIGHBOUR_SOLICITATION: u8 = 135;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
const REDIRECT: u8 = 137;
const MLD2_REPORT: u8 = 143;

/// Hop limit of neighbour discovery: a routed packet has less (RFC 4861, section 7.1).
const NEAR: u8 = 255;
/// Hop limit of MLD: no router passes it on (RFC 3810, section 5).
const LINK: u8 = 1;

const IPV6_LEN: u32 = 40;
/// A hop-by-hop header with the router alert for MLD and padding (RFC 2711).
const ROUTER_ALERT_LEN: u32 = 8;
const ROUTER_ALERT: u64 = 0x3a00_0502_0000_0000;
const ROUTER_ALERT_MASK: u64 = 0xffff_ffff_ffff_0000;

const SOURCE_LINK_ADDRESS: u8 = 1;
const TARGET_LINK_ADDRESS: u8 = 2;
/// RFC 7527: by the nonce a sender recognises its own probe.
const NONCE: u8 = 14;
/// Options of a message about one address: a link-layer address and a nonce.
const NEIGHBOUR_OPTIONS: u32 = 2;
/// Options of a router's message that are read.
const ROUTER_OPTIONS: u32 = 32;
/// Maximum number of records in an MLD report. Linux sends a handful when an interface is set up: one for each
/// address and one for each group that a program joined.
const MLD_RECORDS: u32 = 32;
/// Longest MLD report, bytes: [`MLD_RECORDS`] without sources.
const MLD_REPORT_LEN: u32 = 8 + MLD_RECORDS * 20;

/// Bytes of an ARP packet.
const ARP_LEN: u32 = 28;
/// Operation of an ARP packet that answers a request.
const ARP_REPLY: u64 = 2;
/// Shortest Ethernet frame, without its checksum. A network card fills shorter ones up.
const ETH_MIN: u32 = 60;

/// `BPF_FIB_LKUP_RET_NOT_FWDED`.
const NOT_FORWARDED: i64 = 4;

/// The direction of a message.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    FromPod,
    ToPod,
}

/// The fields of an ARP packet of IPv4 over Ethernet (RFC 826). MACs are packed.
struct Arp {
    is_request: bool,
    sender_mac: u64,
    sender: Address,
    target_mac: u64,
    target: Address,
}

impl Arp {
    /// Reads a packet that is a request or an answer and has nothing behind it but the zeros that
    /// fill a frame of Ethernet's least length.
    #[inline(always)]
    fn of(ctx: &TcContext) -> Result<Self, Reason> {
        let head = u64::from_be_bytes(load(ctx, ETH_LEN)?);
        let operation = head & 0xffff;
        if head >> 16 != 0x0001_0800_0604 || operation == 0 || operation > ARP_REPLY {
            return Err(Reason::Malformed);
        }
        let len = ctx.len();
        if len > ETH_MIN {
            return Err(Reason::Malformed);
        }
        for at in ETH_LEN + ARP_LEN..ETH_MIN {
            if at >= len {
                break;
            }
            let byte: u8 = load(ctx, at)?;
            if byte != 0 {
                return Err(Reason::Malformed);
            }
        }
        Ok(Self {
            is_request: operation != ARP_REPLY,
            sender_mac: pack(load(ctx, ETH_LEN + 8)?),
            sender: Address::v4(load(ctx, ETH_LEN + 14)?),
            target_mac: pack(load(ctx, ETH_LEN + 18)?),
            target: Address::v4(load(ctx, ETH_LEN + 24)?),
        })
    }

    /// Notes the addresses for the record of the packet.
    #[inline(always)]
    fn describe(&self, packet: &mut Packet) {
        packet.family = FAMILY_ARP;
        packet.saddr = self.sender;
        packet.daddr = self.target;
    }
}

/// Judges an ARP packet from the pod. The sender must be the endpoint (RFC 826), or have no address
/// yet (RFC 5227). The target's MAC is of the frame's receiver, of the pod, all zeros or all ones.
#[inline(never)]
pub(crate) fn arp_from_pod(ctx: &TcContext, packet: &mut Packet) -> Result<Reason, Reason> {
    let arp = Arp::of(ctx)?;
    arp.describe(packet);
    if !config::may_be_own_mac(arp.sender_mac) {
        return Err(Reason::SpoofedSource);
    }
    if arp.sender.is_zero() {
        // A probe asks for the address that the sender wants to have.
        if !arp.is_request {
            return Err(Reason::Malformed);
        }
    } else if !config::is_own_v4(arp.sender) {
        return Err(Reason::SpoofedSource);
    }
    let to = Frame::of(ctx)?.to;
    let named = arp.target_mac;
    let is_known = named == 0 || named == BROADCAST || named == to || named == arp.sender_mac;
    of(is_known && (to & 1 == 0 || to == BROADCAST))?;
    Ok(Reason::LinkLocal)
}

/// Judges an ARP packet to the pod. It is for all machines, or about the pod's address, or answers a
/// probe of the pod.
#[inline(never)]
pub(crate) fn arp_to_pod(ctx: &TcContext, packet: &mut Packet) -> Result<Reason, Reason> {
    let arp = Arp::of(ctx)?;
    arp.describe(packet);
    if config::is_own_v4(arp.sender) {
        return Err(Reason::SpoofedSource);
    }
    let answers_probe = !arp.is_request && arp.target.is_zero();
    if Frame::of(ctx)?.to == BROADCAST || config::is_own_v4(arp.target) || answers_probe {
        Ok(Reason::LinkLocal)
    } else {
        Err(Reason::Misaddressed)
    }
}

#[inline(always)]
fn pack(mac: [u8; 6]) -> u64 {
    shared_maps::lxc::pack_mac(mac)
}

/// Whether an IPv6 packet belongs to the link: neighbour discovery or MLD.
#[inline(always)]
pub(crate) fn is_link_message(packet: &Packet) -> bool {
    packet.protocol == ICMPV6 && matches!(packet.icmp_type, MLD_QUERY..=REDIRECT | MLD2_REPORT)
}

/// Judges such a message from the pod. A pod is not a router, so it must not send listener queries
/// or router advertisements.
#[inline(never)]
pub(crate) fn message_from_pod(ctx: &TcContext, packet: &Packet) -> Result<Reason, Reason> {
    let unspecified = packet.saddr.is_zero();
    if !unspecified && !is_own(packet.saddr) {
        return Err(Reason::SpoofedSource);
    }
    match packet.icmp_type {
        MLD_QUERY | ROUTER_ADVERTISEMENT | REDIRECT => return Err(Reason::SpoofedSource),
        MLD_REPORT | MLD_DONE | MLD2_REPORT => multicast_listener(ctx, packet)?,
        _ => {
            neighbour(ctx, packet, Direction::FromPod)?;
            if !is_on_link(ctx, packet.daddr)? {
                return Err(Reason::NotOnLink);
            }
            let claims = packet.icmp_type == NEIGHBOUR_ADVERTISEMENT
                || (packet.icmp_type == NEIGHBOUR_SOLICITATION && unspecified);
            if claims && !is_own(target(ctx, packet)?) {
                return Err(Reason::SpoofedSource);
            }
        }
    }
    Ok(Reason::LinkLocal)
}

/// Judges such a message to the pod.
#[inline(never)]
pub(crate) fn message_to_pod(ctx: &TcContext, packet: &Packet) -> Result<Reason, Reason> {
    let group = match packet.icmp_type {
        MLD_QUERY | MLD_REPORT | MLD_DONE | MLD2_REPORT => {
            multicast_listener(ctx, packet)?;
            // Reports are for routers, and a pod is none. A neighbour's list of groups could be
            // any data.
            if packet.icmp_type != MLD_QUERY && !is_of_this_node(ctx) {
                return Err(Reason::NotOnLink);
            }
            packet.daddr.is_v6_multicast()
        }
        _ => {
            neighbour(ctx, packet, Direction::ToPod)?;
            // Only a solicitation to a group may be about a neighbour.
            if packet.icmp_type == NEIGHBOUR_SOLICITATION
                && is_own(packet.daddr)
                && !is_own(target(ctx, packet)?)
            {
                return Err(Reason::NotOnLink);
            }
            packet.daddr.is_v6_link_multicast()
        }
    };
    if group || is_own(packet.daddr) {
        Ok(Reason::LinkLocal)
    } else {
        Err(Reason::NotOnLink)
    }
}

/// Whether this node made the packet, and did not receive it from an interface.
#[inline(always)]
fn is_of_this_node(ctx: &TcContext) -> bool {
    // SAFETY: the context is valid for the run of the program.
    unsafe { (*ctx.skb.skb).ingress_ifindex == 0 }
}

#[inline(always)]
fn is_own(address: Address) -> bool {
    config::is_own_v6(address) || config::is_own_link_local(address)
}

/// Target address of a solicitation or advertisement.
#[inline(always)]
fn target(ctx: &TcContext, packet: &Packet) -> Result<Address, Reason> {
    Ok(Address(load(ctx, packet.l4 + 8)?))
}

/// Whether a message of the pod to `to` stays on its link. Its destination is then a group of the
/// link, the node, or, at a bridge, a neighbour that the frame reaches without the node. The node
/// would route other messages and fill its neighbour table, one entry for each address.
#[inline(always)]
fn is_on_link(ctx: &TcContext, to: Address) -> Result<bool, Reason> {
    if to.is_v6_link_multicast() || config::is_link_local_of_node(to) {
        return Ok(true);
    }
    if to.is_v6_multicast() {
        return Ok(false);
    }
    if to.is_v6_link_local() {
        return is_switched(ctx);
    }
    let key = LxcKey {
        ip: to.bytes(),
        family: FAMILY_IPV6,
        key: 0,
        cluster_id: 0,
    };
    // SAFETY: the map is not preallocated, values stay until the grace period.
    if let Some(value) = unsafe { LXC.get(key) }
        && value.flags & FLAG_HOST != 0
    {
        return Ok(true);
    }
    if is_delivered_here(ctx, to) {
        return Ok(true);
    }
    Ok(config::is_on_bridge_prefix(to) && is_switched(ctx)?)
}

/// Whether the node's routes keep a packet to `to` on the node. This also finds an address that the
/// node got a moment ago.
#[inline(never)]
fn is_delivered_here(ctx: &TcContext, to: Address) -> bool {
    const WORDS: usize = size_of::<FibLookup>() / 4;
    /// `AF_INET6`, in the first byte.
    const FAMILY: u32 = 10u32.to_le();
    // `struct bpf_fib_lookup`, whose fields from the source on are words. The source stays
    // unspecified, because the kernel finds no route from a link-local one.
    let mut lookup = [0_u32; WORDS];
    lookup[0] = FAMILY;
    // SAFETY: the context is valid for the run of the program.
    lookup[2] = unsafe { (*ctx.skb.skb).ifindex };
    [lookup[8], lookup[9], lookup[10], lookup[11]] = to.0;
    // SAFETY: the structure is as long as it is said to be.
    let lookup = unsafe {
        bpf_fib_lookup(
            ctx.skb.skb.cast(),
            (&raw mut lookup).cast(),
            size_of::<FibLookup>() as i32,
            0,
        )
    };
    lookup == NOT_FORWARDED
}

/// Whether the bridge sends the frame to another of its ports, without the node.
#[inline(always)]
fn is_switched(ctx: &TcContext) -> Result<bool, Reason> {
    if !config::is_bridge_port() {
        return Ok(false);
    }
    let to = pack(load(ctx, 0)?);
    Ok(to != pack(config::gateway_mac()) && to != pack(config::bridge_mac()))
}

/// End of the message, if it is complete, has nothing after it, and begins `headers` bytes after
/// the IPv6 header.
#[inline(always)]
fn end(ctx: &TcContext, packet: &Packet, headers: u32) -> Result<u32, Reason> {
    let payload = u32::from(u16::from_be(load(ctx, ETH_LEN + 4)?));
    let code: u8 = load(ctx, packet.l4 + 1)?;
    let whole = ETH_LEN + IPV6_LEN + payload == packet.len;
    if code != 0 || !whole || packet.l4 != ETH_LEN + IPV6_LEN + headers {
        return Err(Reason::Malformed);
    }
    Ok(packet.len)
}

/// Checks the form of a message of neighbour discovery.
#[inline(always)]
fn neighbour(ctx: &TcContext, packet: &Packet, direction: Direction) -> Result<(), Reason> {
    let end = end(ctx, packet, 0)?;
    let unspecified = packet.saddr.is_zero();
    let from_router = matches!(packet.icmp_type, ROUTER_ADVERTISEMENT | REDIRECT);
    if packet.hop_limit != NEAR || (from_router && !packet.saddr.is_v6_link_local()) {
        return Err(Reason::Malformed);
    }
    let (body, option) = match packet.icmp_type {
        ROUTER_SOLICITATION => (8, SOURCE_LINK_ADDRESS),
        NEIGHBOUR_SOLICITATION => (24, SOURCE_LINK_ADDRESS),
        NEIGHBOUR_ADVERTISEMENT if !unspecified => (24, TARGET_LINK_ADDRESS),
        ROUTER_ADVERTISEMENT => (16, 0),
        REDIRECT => (40, 0),
        _ => return Err(Reason::Malformed),
    };
    let start = packet.l4 + body;
    if from_router {
        return router_options(ctx, start, end);
    }
    // Flags are in the first three bits of an advertisement. All else is reserved, and zero.
    let reserved: u32 = load(ctx, packet.l4 + 4)?;
    let flags = if packet.icmp_type == NEIGHBOUR_ADVERTISEMENT {
        0xe000_0000u32
    } else {
        0
    };
    of(u32::from_be(reserved) & !flags == 0)?;
    // A sender without an address must not resolve a unicast address (RFC 4861, section 7.1.1).
    if unspecified && !packet.daddr.is_v6_link_multicast() {
        return Err(Reason::Malformed);
    }
    let option = if unspecified { NONCE } else { option };
    let checked = if direction == Direction::FromPod {
        config::mac()
    } else {
        [0; 6]
    };
    neighbour_options(ctx, start, end, option, pack(checked))
}

/// The options must be at most a link-layer address (`kind`; it must be `mac`, unless that is 0)
/// and a nonce, eight bytes each.
#[inline(never)]
fn neighbour_options(
    ctx: &TcContext,
    start: u32,
    end: u32,
    kind: u8,
    mac: u64,
) -> Result<(), Reason> {
    let mut at = start;
    for _ in 0..NEIGHBOUR_OPTIONS {
        if at == end {
            return Ok(());
        }
        let [k, units, a, b, c, d, e, f]: [u8; 8] = load(ctx, at)?;
        if units != 1 || (k != kind && k != NONCE) {
            return Err(Reason::Malformed);
        }
        if k != NONCE && mac != 0 && pack([a, b, c, d, e, f]) != mac {
            return Err(Reason::SpoofedSource);
        }
        at += 8;
    }
    if at == end {
        Ok(())
    } else {
        Err(Reason::Malformed)
    }
}

/// Options of a router's message, of any kind, must fill the message.
#[inline(never)]
fn router_options(ctx: &TcContext, start: u32, end: u32) -> Result<(), Reason> {
    let mut at = start;
    for _ in 0..ROUTER_OPTIONS {
        if at >= end {
            break;
        }
        let [_kind, units]: [u8; 2] = load(ctx, at)?;
        if units == 0 {
            return Err(Reason::Malformed);
        }
        at += u32::from(units) * 8;
    }
    if at == end {
        Ok(())
    } else {
        Err(Reason::Malformed)
    }
}

/// Checks the form of an MLD message.
#[inline(always)]
fn multicast_listener(ctx: &TcContext, packet: &Packet) -> Result<(), Reason> {
    let end = end(ctx, packet, ROUTER_ALERT_LEN)?;
    let unspecified = packet.saddr.is_zero();
    let alert = u64::from_be_bytes(load(ctx, ETH_LEN + IPV6_LEN)?);
    let near = packet.saddr.is_v6_link_local() || (unspecified && packet.icmp_type != MLD_QUERY);
    if packet.hop_limit != LINK || !near || alert & ROUTER_ALERT_MASK != ROUTER_ALERT {
        return Err(Reason::Malformed);
    }
    let length = end - packet.l4;
    match packet.icmp_type {
        // RFC 2710; a query of MLDv2 names sources.
        MLD_QUERY if length == 24 => Ok(()),
        MLD_QUERY => {
            let sources = u32::from(u16::from_be(load(ctx, packet.l4 + 26)?));
            of(length == 28 + sources * 16)
        }
        MLD_REPORT => of(length == 24 && packet.daddr.is(target(ctx, packet)?)),
        MLD_DONE => of(length == 24),
        _ => listener_records(ctx, packet.l4, end),
    }?;
    of(packet.daddr.is_v6_multicast())
}

#[inline(always)]
fn of(well_formed: bool) -> Result<(), Reason> {
    if well_formed {
        Ok(())
    } else {
        Err(Reason::Malformed)
    }
}

/// Records of an MLDv2 report must fill the report (RFC 3810, section 5.2).
#[inline(never)]
fn listener_records(ctx: &TcContext, message: u32, end: u32) -> Result<(), Reason> {
    let count = u32::from(u16::from_be(load(ctx, message + 6)?));
    let mut at = message + 8;
    for record in 0..MLD_RECORDS {
        if record >= count {
            break;
        }
        let [kind, extra, high, low, group]: [u8; 5] = load(ctx, at)?;
        if kind == 0 || kind > 6 || extra != 0 || group != 0xff {
            return Err(Reason::Malformed);
        }
        at += 20 + 16 * u32::from(u16::from_be_bytes([high, low]));
    }
    of(count <= MLD_RECORDS && end - message <= MLD_REPORT_LEN && at == end)
}
