//! ARP and neighbour discovery of a pod: passes, but only for its own addresses.

use aya_ebpf::programs::TcContext;
use shared_maps::event::Reason;

use crate::{
    address::Address,
    config,
    packet::{ETH_LEN, ICMPV6, Packet, load},
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

/// Judges an ARP packet from the pod: the sender must be the endpoint (RFC 826), or nobody yet (RFC 5227).
#[inline(always)]
pub(crate) fn arp_from_pod(ctx: &TcContext) -> Result<Reason, Reason> {
    let head: [u8; 8] = load(ctx, ETH_LEN)?;
    if u64::from_be_bytes(head) >> 16 != 0x0001_0800_0604 {
        return Err(Reason::Malformed);
    }
    let sender_mac: [u8; 6] = load(ctx, ETH_LEN + 8)?;
    let sender = Address::v4(load(ctx, ETH_LEN + 14)?);
    let own = config::mac();
    let known = own[0] | own[1] | own[2] | own[3] | own[4] | own[5] != 0;
    if known && pack(sender_mac) != pack(own) {
        return Err(Reason::SpoofedSource);
    }
    if sender.is_zero() || config::is_own_v4(sender) {
        Ok(Reason::LinkLocal)
    } else {
        Err(Reason::SpoofedSource)
    }
}

#[inline(always)]
fn pack(mac: [u8; 6]) -> u64 {
    shared_maps::lxc::pack_mac(mac)
}

/// Whether an IPv6 packet belongs to the link: neighbour discovery (RFC 4861) or MLD (RFC 3810).
#[inline(always)]
pub(crate) fn is_link_message(packet: &Packet) -> bool {
    packet.protocol == ICMPV6 && matches!(packet.icmp_type, MLD_QUERY..=REDIRECT | MLD2_REPORT)
}

/// Judges such a message from the pod.
#[inline(always)]
pub(crate) fn message_from_pod(ctx: &TcContext, packet: &Packet) -> Result<Reason, Reason> {
    let unspecified = packet.saddr.is_zero();
    if !unspecified && !is_own(packet.saddr) {
        return Err(Reason::SpoofedSource);
    }
    match packet.icmp_type {
        // MLD has hop limit 1; a pod is no router, so it asks nothing.
        MLD_REPORT | MLD_DONE | MLD2_REPORT if packet.hop_limit == 1 => Ok(Reason::LinkLocal),
        ROUTER_SOLICITATION if packet.hop_limit == 255 => Ok(Reason::LinkLocal),
        NEIGHBOUR_SOLICITATION if packet.hop_limit == 255 => {
            // Duplicate address detection claims the target (RFC 4862, section 5.4).
            if unspecified && !is_own(target(ctx, packet)?) {
                return Err(Reason::SpoofedSource);
            }
            Ok(Reason::LinkLocal)
        }
        NEIGHBOUR_ADVERTISEMENT if packet.hop_limit == 255 => {
            if is_own(target(ctx, packet)?) {
                Ok(Reason::LinkLocal)
            } else {
                Err(Reason::SpoofedSource)
            }
        }
        MLD_QUERY | ROUTER_ADVERTISEMENT | REDIRECT => Err(Reason::SpoofedSource),
        _ => Err(Reason::Malformed),
    }
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
