//! ICMP errors: related to a connection by the packet that they quote.

use aya_ebpf::programs::TcContext;
use shared_maps::{
    FAMILY_IPV4,
    conntrack::{DIR_IN, DIR_OUT},
};

use crate::{
    conntrack::{self, As},
    maps::SCRATCH,
    packet::{Fragment, Packet, parse_ip},
};

/// Bytes of an ICMP header before the quoted packet.
const HEADER_LEN: u32 = 8;

/// Whether the type is that of an error message.
#[inline(always)]
pub(crate) fn is_error(packet: &Packet) -> bool {
    if !packet.is_icmp() {
        return false;
    }
    if packet.family == FAMILY_IPV4 {
        // Unreachable, time exceeded, parameter problem. Not source quench
        // (RFC 6633) and not redirects.
        matches!(packet.icmp_type, 3 | 11 | 12)
    } else {
        packet.icmp_type < 128
    }
}

/// The packet that an ICMP error quotes, if it is the start of one.
#[inline(always)]
pub(crate) fn quoted<'a>(ctx: &TcContext, packet: &Packet) -> Option<&'a Packet> {
    let scratch = SCRATCH.get_ptr_mut(0)?;
    // SAFETY: the value is this CPU's own, and `packet` is its other field.
    let quoted = unsafe { &mut (*scratch).quoted };
    quoted.reset(packet.len);
    if parse_ip(ctx, packet.l4 + HEADER_LEN, packet.family, true, quoted).is_err()
        || quoted.fragment == Fragment::Later
    {
        return None;
    }
    Some(quoted)
}

/// Whether an ICMP error quotes a packet of a live connection of the endpoint.
///
/// `from_pod`: the pod complains about a packet that it received; else
/// somebody complains about a packet that the pod sent. What goes to the proxy
/// nobody but this node (`local`) ever saw.
#[inline(never)]
pub(crate) fn is_related(ctx: &TcContext, packet: &Packet, from_pod: bool, local: bool) -> bool {
    let Some(quoted) = quoted(ctx, packet) else {
        return false;
    };
    let meant_for_sender = if from_pod {
        quoted.daddr.is(packet.saddr) && quoted.saddr.is(packet.daddr)
    } else {
        quoted.saddr.is(packet.daddr)
    };
    if !meant_for_sender {
        return false;
    }
    let now = conntrack::now();
    let (forward, backward) = if from_pod {
        (DIR_IN, DIR_OUT)
    } else {
        (DIR_OUT, DIR_IN)
    };
    if let Some(value) = conntrack::find(quoted, forward, As::Forward, now) {
        return from_pod || local || !conntrack::is_redirected(value);
    }
    conntrack::find(quoted, backward, As::Reply, now).is_some()
}
