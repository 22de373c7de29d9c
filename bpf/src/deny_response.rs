//! Replies to packets that egress policy denies, for clients that would wait for an answer.
//!
//! The denied packet itself becomes the reply: addresses and ports are exchanged, and the rest is
//! written again. `bpf_redirect_peer` then moves it to the other end of the pair, into the pod.
//! `to_pod` does not run, so it needs no exception for replies, which other senders could use.
//!
//! | Denied | Reply |
//! |---|---|
//! | TCP | RST |
//! | query of a DNS server, over UDP | REFUSED |
//! | other | ICMP: administratively prohibited |
//!
//! The checksum of a reply is right whether the pod's stack completed that of its packet or left it
//! to the device (`CHECKSUM_PARTIAL`): see [`reset`] and [`unreachable`].

use aya_ebpf::{
    bindings::{BPF_F_MARK_MANGLED_0, BPF_F_RECOMPUTE_CSUM, bpf_adj_room_mode::BPF_ADJ_ROOM_MAC},
    helpers::{bpf_ktime_get_ns, bpf_redirect_peer, bpf_skb_change_tail},
    programs::TcContext,
};
use shared_maps::{
    FAMILY_IPV4,
    event::Reason,
    quota::{BURST_NS, DENY_RESPONSE_INTERVAL_NS, Limit},
};

use crate::{
    config,
    from_pod::{DROP, Trace},
    maps::DENY_CLOCKS,
    packet::{
        ETH_LEN, Fragment, Frame, ICMP, ICMPV6, Packet, TCP, TCP_ACK, TCP_RST, TCP_SYN, UDP, load,
    },
    quota,
};

/// Length of an IPv4 header without options.
const IPV4_LEN: u32 = 20;
/// Length of an IPv6 header without extension headers.
const IPV6_LEN: u32 = 40;
/// TTL or hop limit of a reply.
const HOP_LIMIT: u8 = 64;
/// `PACKET_HOST`: for this machine.
const PACKET_HOST: u32 = 0;

/// Type and code of "communication administratively prohibited" (RFC 1812, section 5.2.7.1).
const PROHIBITED_V4: [u8; 4] = [3, 13, 0, 0];
/// The same of ICMPv6 (RFC 4443, section 3.1).
const PROHIBITED_V6: [u8; 4] = [1, 1, 0, 0];
/// "Fragmentation needed" (RFC 1191).
const FRAGMENTATION_NEEDED: [u8; 4] = [3, 4, 0, 0];
/// Words of the denied packet that an ICMP message quotes: the IP header and the first 8 bytes
/// after it.
const QUOTE_V4: usize = 7;
const QUOTE_V6: usize = 12;

const ECHO_REQUEST_V4: u8 = 8;
const ECHO_REQUEST_V6: u8 = 128;

const DNS_PORT: u16 = 53;
/// "This is a response", and its code REFUSED.
const RESPONSE_REFUSED: u16 = 0x8005;
/// What a response copies of the query's flags: RD and CD.
const COPIED_FLAGS: u16 = 0x0110;

/// A packet that gets no reply, or that could not be changed.
struct NoReply;

/// Replies to the packet if egress policy denied it and the node replies to such packets. Returns
/// the program's result.
#[inline(always)]
pub(crate) fn reply(
    ctx: &TcContext,
    packet: &Packet,
    trace: &Trace,
    verdict: Result<Reason, Reason>,
) -> i32 {
    // The identity is known only if egress policy judged the packet. Later fragments, and replies
    // that ingress policy no longer allows, have none.
    let denied = matches!(verdict, Err(Reason::PolicyDenied | Reason::PolicyDeny))
        && trace.remote_identity != 0;
    if !denied || !config::replies_to_denied() {
        return DROP;
    }
    send(ctx, packet)
}

#[inline(never)]
fn send(ctx: &TcContext, packet: &Packet) -> i32 {
    if !may_have_reply(ctx, packet) || turn_round(ctx, packet).is_err() {
        return DROP;
    }
    give_back(ctx)
}

/// Moves the reply to the pod.
#[inline(always)]
fn give_back(ctx: &TcContext) -> i32 {
    // At a bridge port the frame was for another machine.
    if ctx.change_type(PACKET_HOST).is_err() {
        return DROP;
    }
    ctx.set_mark(0);
    // SAFETY: the context is valid for the run of the program. The helper takes any interface.
    unsafe { bpf_redirect_peer((*ctx.skb.skb).ifindex, 0) as i32 }
}

/// Answers a packet that is too long for the tunnel with the length that fits, whether the pod allows
/// fragments or not. Returns the program's result.
#[inline(never)]
pub(crate) fn too_big(ctx: &TcContext, packet: &Packet, fits: u32) -> i32 {
    if !may_have_reply(ctx, packet)
        || is_not_answerable(packet)
        || unreachable::<QUOTE_V4>(ctx, packet, FRAGMENTATION_NEEDED, fits.to_be()).is_err()
    {
        return DROP;
    }
    give_back(ctx)
}

/// An ICMP message that is no question: errors never cause errors.
#[inline(always)]
fn is_not_answerable(packet: &Packet) -> bool {
    packet.protocol == ICMP && packet.icmp_type != ECHO_REQUEST_V4
}

/// Whether the packet is from one machine to one machine, and its IP header has the usual length
/// (RFC 1122, section 3.2.2; RFC 4443, section 2.4).
#[inline(always)]
fn may_have_reply(ctx: &TcContext, packet: &Packet) -> bool {
    let Ok(frame) = Frame::of(ctx) else {
        return false;
    };
    if frame.is_to_group() || packet.fragment == Fragment::Later {
        return false;
    }
    if packet.family == FAMILY_IPV4 {
        // 0.0.0.0/8 is no machine, and 224.0.0.0/3 is multicast, reserved and broadcast.
        let first = u32::from_be(packet.daddr.0[0]) >> 24;
        packet.l4 == ETH_LEN + IPV4_LEN
            && (1..224).contains(&first)
            && !config::is_group_v4(packet.daddr)
    } else {
        packet.l4 == ETH_LEN + IPV6_LEN
            && !packet.daddr.is_v6_multicast()
            && !packet.daddr.is_zero()
    }
}

/// Makes the packet the reply to itself.
#[inline(always)]
fn turn_round(ctx: &TcContext, packet: &Packet) -> Result<(), NoReply> {
    let is_dns = packet.dport == DNS_PORT.to_be() && config::refuses_dns();
    let for_all = config::replies_to_all_denied();
    match packet.protocol {
        TCP if is_dns || for_all => reset(ctx, packet),
        UDP if is_dns && is_query(ctx, packet) => refuse(ctx, packet),
        // Errors never cause errors. Of other messages, only an echo request awaits an answer.
        ICMP if packet.icmp_type != ECHO_REQUEST_V4 => Err(NoReply),
        ICMPV6 if packet.icmp_type != ECHO_REQUEST_V6 => Err(NoReply),
        _ if !for_all => Err(NoReply),
        _ if packet.family == FAMILY_IPV4 => unreachable::<QUOTE_V4>(ctx, packet, PROHIBITED_V4, 0),
        _ => unreachable::<QUOTE_V6>(ctx, packet, PROHIBITED_V6, 0),
    }
}

/// Counts one reply of the endpoint, if its quota allows one more now: a token bucket, as in
/// [`quota`].
#[inline(always)]
fn use_quota(packet: &Packet) -> Result<(), NoReply> {
    let clock = DENY_CLOCKS.get_ptr_mut(config::slot()).ok_or(NoReply)?;
    // SAFETY: the helper has no preconditions.
    let now = unsafe { bpf_ktime_get_ns() };
    // SAFETY: two CPUs at once count one reply too few.
    let due = unsafe { clock.read_volatile() }.max(now);
    if due - now > BURST_NS {
        quota::count(Limit::DenyResponses, packet.len);
        return Err(NoReply);
    }
    // SAFETY: as above.
    unsafe { clock.write_volatile(due + DENY_RESPONSE_INTERVAL_NS) };
    Ok(())
}

/// A TCP segment becomes the RST that a closed port would send (RFC 9293, section 3.10.7.1).
///
/// A segment whose checksum was left to the device has the sum of the pseudo header in the field,
/// and the device adds the rest. The field gets that sum, and `bpf_l4_csum_replace` completes it
/// only if the device does not.
#[inline(never)]
fn reset(ctx: &TcContext, packet: &Packet) -> Result<(), NoReply> {
    const LEN: u32 = 20;
    /// Offset of the checksum in the TCP header.
    const CHECKSUM: u32 = 16;
    let [seq, ack]: [u32; 2] = get(ctx, packet.l4 + 4)?;
    let (seq, ack, flags) = match packet.tcp_flags & (TCP_RST | TCP_ACK | TCP_SYN) {
        flags if flags & TCP_RST != 0 => return Err(NoReply),
        flags if flags & TCP_ACK != 0 => (ack, 0, TCP_RST),
        TCP_SYN => (
            0,
            u32::from_be(seq).wrapping_add(1).to_be(),
            TCP_RST | TCP_ACK,
        ),
        _ => return Err(NoReply),
    };
    use_quota(packet)?;
    resize(ctx, packet.l4 + LEN)?;
    write_headers(ctx, packet, TCP, LEN)?;
    let ports = u32::from(packet.dport) | u32::from(packet.sport) << 16;
    let offset_and_flags = u32::from_ne_bytes([0x50, flags, 0, 0]);
    let pseudo = fold(pseudo_header(packet, TCP, LEN));
    let header = [ports, seq, ack, offset_and_flags, u32::from(pseudo)];
    put(ctx, packet.l4, &header)?;
    // From ~pseudo to ~(pseudo + segment).
    let segment = sum([ports, seq, ack, offset_and_flags]);
    let difference = u64::from(fold(segment + 2 * u64::from(pseudo)));
    let at = (packet.l4 + CHECKSUM) as usize;
    ctx.l4_csum_replace(at, 0, difference, 0)
        .map_err(|_| NoReply)
}

/// A packet becomes an ICMP message that quotes it, from its destination. `kind` is the message's first
/// word, `rest` the second.
///
/// If the checksum of a datagram was left to the device, the device would write it into the
/// message. It does not if the place where its sum begins has been removed from the packet.
#[inline(never)]
fn unreachable<const QUOTE: usize>(
    ctx: &TcContext,
    packet: &Packet,
    kind: [u8; 4],
    rest: u32,
) -> Result<(), NoReply> {
    const HEADER_LEN: u32 = 8;
    let quote: [u32; QUOTE] = get(ctx, ETH_LEN)?;
    use_quota(packet)?;
    let len = HEADER_LEN + 4 * QUOTE as u32;
    // Older kernels (5.10.223 for one) do not change the length of a packet from which that place has been
    // removed, so the packet gets its length first.
    resize(ctx, packet.l4 + 2 * len)?;
    // All but an IP header is removed, which is two bytes more than precede the datagram.
    ctx.adjust_room(-(len as i32), BPF_ADJ_ROOM_MAC, 0)
        .map_err(|_| NoReply)?;
    let (protocol, pseudo) = if QUOTE == QUOTE_V4 {
        (ICMP, 0)
    } else {
        (ICMPV6, pseudo_header(packet, ICMPV6, len))
    };
    let kind = u32::from_ne_bytes(kind);
    let checksum = !fold(pseudo + u64::from(kind) + u64::from(rest) + sum(quote));
    let header = [kind | u32::from(checksum) << 16, rest];
    write_headers(ctx, packet, protocol, len)?;
    put(ctx, packet.l4, &header)?;
    put(ctx, packet.l4 + HEADER_LEN, &quote)
}

/// Whether a datagram to port 53 is one query, alone in its packet.
#[inline(always)]
fn is_query(ctx: &TcContext, packet: &Packet) -> bool {
    // SAFETY: the context is valid for the run of the program.
    let segments = unsafe { (*ctx.skb.skb).gso_size };
    if segments != 0 || packet.fragment != Fragment::None {
        return false;
    }
    let Ok([_, flags, questions, answers, authorities, additional]) =
        get::<[u16; 6]>(ctx, packet.l4 + UDP_LEN)
    else {
        return false;
    };
    // A query, of opcode 0. Its additional record is EDNS.
    u16::from_be(flags) & 0xf800 == 0
        && questions == 1u16.to_be()
        && answers == 0
        && authorities == 0
        && u16::from_be(additional) <= 1
}

/// A DNS query becomes the answer that the server refuses it. Question and EDNS record stay.
///
/// Exchanged addresses and ports leave all sums as they are.
#[inline(never)]
fn refuse(ctx: &TcContext, packet: &Packet) -> Result<(), NoReply> {
    /// Offset of the checksum in the UDP header.
    const CHECKSUM: u32 = 6;
    let at = packet.l4 + UDP_LEN + 2;
    let flags: u16 = get(ctx, at)?;
    use_quota(packet)?;
    exchange_macs(ctx)?;
    if packet.family == FAMILY_IPV4 {
        let addresses = [packet.daddr.0[0], packet.saddr.0[0]];
        put(ctx, ETH_LEN + 12, &addresses)?;
    } else {
        let addresses = [packet.daddr.0, packet.saddr.0];
        put(ctx, ETH_LEN + 8, &addresses)?;
    }
    put(ctx, packet.l4, &[packet.dport, packet.sport])?;
    let refused = (u16::from_be(flags) & COPIED_FLAGS | RESPONSE_REFUSED).to_be();
    let replaced = ctx.l4_csum_replace(
        (packet.l4 + CHECKSUM) as usize,
        u64::from(flags),
        u64::from(refused),
        2 | u64::from(BPF_F_MARK_MANGLED_0),
    );
    replaced.map_err(|_| NoReply)?;
    ctx.store(at as usize, &refused, 0).map_err(|_| NoReply)
}

/// Length of a UDP header.
const UDP_LEN: u32 = 8;

/// Writes the Ethernet and IP headers of a reply with `len` bytes after them.
#[inline(never)]
fn write_headers(ctx: &TcContext, packet: &Packet, protocol: u8, len: u32) -> Result<(), NoReply> {
    exchange_macs(ctx)?;
    if packet.family == FAMILY_IPV4 {
        let total = (IPV4_LEN + len) as u16;
        let start = u32::from_ne_bytes([0x45, 0, (total >> 8) as u8, total as u8]);
        // No identification; do not fragment.
        let fragment = 0x4000_u32.to_be();
        let limit = u32::from_ne_bytes([HOP_LIMIT, protocol, 0, 0]);
        let (from, to) = (packet.daddr.0[0], packet.saddr.0[0]);
        let checksum = !fold(sum([start, fragment, limit, from, to]));
        let limit = limit | u32::from(checksum) << 16;
        return put(ctx, ETH_LEN, &[start, fragment, limit, from, to]);
    }
    let len = len as u16;
    let start = [
        u32::from_ne_bytes([0x60, 0, 0, 0]),
        u32::from_ne_bytes([(len >> 8) as u8, len as u8, protocol, HOP_LIMIT]),
    ];
    put(ctx, ETH_LEN, &start)?;
    put(ctx, ETH_LEN + 8, &[packet.daddr.0, packet.saddr.0])
}

#[inline(always)]
fn exchange_macs(ctx: &TcContext) -> Result<(), NoReply> {
    let [a, b, c, d, e, f]: [u16; 6] = get(ctx, 0)?;
    put(ctx, 0, &[d, e, f, a, b, c])
}

/// Sum of the pseudo header of a reply.
#[inline(always)]
fn pseudo_header(packet: &Packet, protocol: u8, len: u32) -> u64 {
    sum(packet.saddr.0) + sum(packet.daddr.0) + sum([u32::from(protocol).to_be(), len.to_be()])
}

#[inline(always)]
pub(crate) fn sum<const N: usize>(words: [u32; N]) -> u64 {
    let mut sum = 0;
    for word in words {
        sum += u64::from(word);
    }
    sum
}

/// The Internet checksum's sum of 16-bit words, from a sum of wider ones.
#[inline(always)]
pub(crate) fn fold(sum: u64) -> u16 {
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

#[inline(always)]
fn get<T>(ctx: &TcContext, at: u32) -> Result<T, NoReply> {
    load(ctx, at).map_err(|_| NoReply)
}

#[inline(always)]
fn put<T>(ctx: &TcContext, at: u32, value: &T) -> Result<(), NoReply> {
    ctx.store(at as usize, value, u64::from(BPF_F_RECOMPUTE_CSUM))
        .map_err(|_| NoReply)
}

/// Cuts or extends the packet. What was one packet of several segments is one segment then.
#[inline(always)]
fn resize(ctx: &TcContext, len: u32) -> Result<(), NoReply> {
    // SAFETY: the context is valid for the run of the program.
    match unsafe { bpf_skb_change_tail(ctx.skb.skb, len, 0) } {
        0 => Ok(()),
        _ => Err(NoReply),
    }
}
