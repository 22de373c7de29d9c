//! ICMP errors of routers about wrapped packets.
//!
//! A router quotes the outer packet, which the pod did not send: it would ignore the error. The outer
//! headers are cut out of the quote, so that the error is about the pod's own packet, and the length
//! that the next link carries is less by as much.

use aya_ebpf::{
    bindings::{
        BPF_F_ADJ_ROOM_FIXED_GSO, BPF_F_RECOMPUTE_CSUM, bpf_adj_room_mode::BPF_ADJ_ROOM_MAC,
    },
    programs::TcContext,
};
use shared_maps::tunnel::{self, OVERHEAD};

use crate::{
    deny_response::{fold, sum},
    packet::{ETH_LEN, ETH_P_IP, Fragment, Packet, UDP, load},
    tunnel::IPV4_LEN,
};

/// Length of an ICMP header before the quoted packet.
const ICMP_LEN: u32 = 8;
/// 16-bit words that are cut out of the quote.
const CUT: usize = OVERHEAD as usize / 2;
/// Type and code of "fragmentation needed", as they are in the packet's first word.
const TOO_BIG: u16 = u16::from_ne_bytes([3, 4]);

/// Makes the error one about the inner packet, if it quotes a wrapped packet of the pod. Otherwise it
/// stays as it is.
#[inline(never)]
pub(crate) fn translate(ctx: &TcContext, packet: &Packet, port: u16) {
    let Some((ip, header)) = translated(ctx, packet, port) else {
        return;
    };
    let cut = -(OVERHEAD as i32);
    if ctx
        .adjust_room(cut, BPF_ADJ_ROOM_MAC, u64::from(BPF_F_ADJ_ROOM_FIXED_GSO))
        .is_err()
    {
        return;
    }
    // Where the kernel refuses one of them, the pod ignores the message.
    let flags = u64::from(BPF_F_RECOMPUTE_CSUM);
    let _ = ctx.store(ETH_LEN as usize, &ip, flags);
    let _ = ctx.store((ETH_LEN + IPV4_LEN) as usize, &header, flags);
}

/// IP and ICMP header of the error about the inner packet.
#[inline(always)]
fn translated(ctx: &TcContext, packet: &Packet, port: u16) -> Option<([u32; 5], [u16; 4])> {
    if packet.l4 != ETH_LEN + IPV4_LEN || packet.fragment != Fragment::None {
        return None;
    }
    let [kind, checksum, extension, mtu]: [u16; 4] = load(ctx, packet.l4).ok()?;
    let quote: [u16; CUT] = load(ctx, packet.l4 + ICMP_LEN).ok()?;
    let inner: [u16; 10] = load(ctx, packet.l4 + ICMP_LEN + OVERHEAD).ok()?;
    // The pod sent what is quoted.
    let [a, b, c, d] = packet.daddr.v4_bytes();
    let source = [u16::from_ne_bytes([a, b]), u16::from_ne_bytes([c, d])];
    let is_ours = extension == 0
        && quote[0].to_ne_bytes()[0] == 0x45
        && quote[4].to_ne_bytes()[1] == UDP
        && quote[6] == source[0]
        && quote[7] == source[1]
        && quote[11] == port.to_be()
        && tunnel::has_vni(quote[14].to_ne_bytes()[0])
        && quote[24] == ETH_P_IP.to_be();
    let same = inner[6] == quote[6]
        && inner[7] == quote[7]
        && inner[8] == quote[8]
        && inner[9] == quote[9];
    if !is_ours || !same || inner[0].to_ne_bytes()[0] >> 4 != 4 {
        return None;
    }
    let fits = u16::from_be(mtu);
    let mtu_now = if kind == TOO_BIG && u32::from(fits) > OVERHEAD {
        (fits - OVERHEAD as u16).to_be()
    } else {
        mtu
    };
    // Of a sum of 16-bit words, those that are cut out are subtracted: their complements are added.
    let mut total = u64::from(!checksum) + u64::from(!mtu) + u64::from(mtu_now);
    for word in quote {
        total += u64::from(!word);
    }
    let header = [kind, !fold(total), 0, mtu_now];
    Some((shortened(ctx)?, header))
}

/// The error's own IP header, for a packet that is shorter by what is cut out.
#[inline(always)]
fn shortened(ctx: &TcContext) -> Option<[u32; 5]> {
    let mut ip: [u32; 5] = load(ctx, ETH_LEN).ok()?;
    let [version, service, high, low] = ip[0].to_ne_bytes();
    let length = u16::from_be_bytes([high, low]).checked_sub(OVERHEAD as u16)?;
    let [high, low] = length.to_be_bytes();
    ip[0] = u32::from_ne_bytes([version, service, high, low]);
    // The checksum is the upper half of the third word in network order.
    let [limit, protocol, _, _] = ip[2].to_ne_bytes();
    ip[2] = u32::from_ne_bytes([limit, protocol, 0, 0]);
    let checksum = !fold(sum(ip));
    let [a, b] = checksum.to_ne_bytes();
    ip[2] = u32::from_ne_bytes([limit, protocol, a, b]);
    Some(ip)
}
