//! ICMP errors, which belong to the connection of the packet that they quote.

use aya_ebpf::programs::TcContext;
use shared_maps::{
    FAMILY_IPV4,
    conntrack::{DIR_IN, DIR_OUT},
};

use crate::{
    conntrack::{self, As},
    maps::SCRATCH,
    packet::{Fragment, Packet, parse_ip},
    redirect::{self, Note},
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

/// Subject of an ICMP error that the pod sends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum About {
    /// A packet of a live connection of the endpoint.
    Connection,
    /// A packet that the proxy sent.
    Redirected,
    /// Nothing that the pod was sent.
    Nothing,
}

/// Finds the packet that an ICMP error of the pod quotes. The pod received that packet from the
/// destination of the error.
#[inline(never)]
pub(crate) fn of_pod(ctx: &TcContext, packet: &Packet) -> About {
    let Some(quoted) = quoted(ctx, packet) else {
        return About::Nothing;
    };
    if !quoted.daddr.is(packet.saddr) || !quoted.saddr.is(packet.daddr) {
        return About::Nothing;
    }
    let note = redirect::of_sender(quoted);
    if note == Note::Redirected {
        return About::Redirected;
    }
    let now = conntrack::now();
    if conntrack::find(quoted, DIR_IN, As::Forward, now).is_some()
        || conntrack::find(quoted, DIR_OUT, As::Reply, now).is_some()
    {
        About::Connection
    } else if note == Note::Former {
        // The proxy still answers queries that it received before the change of policy.
        About::Redirected
    } else {
        About::Nothing
    }
}

/// Whether an ICMP error to the pod quotes a packet of the pod that belongs to a live connection or
/// went to the proxy. Packets to the proxy never leave this node, so only an error from it
/// (`local`) can quote one.
#[inline(never)]
pub(crate) fn is_to_pod_related(ctx: &TcContext, packet: &Packet, local: bool) -> bool {
    let Some(quoted) = quoted(ctx, packet) else {
        return false;
    };
    if !quoted.saddr.is(packet.daddr) {
        return false;
    }
    if local && redirect::of_destination(quoted) != Note::None {
        return true;
    }
    let now = conntrack::now();
    conntrack::find(quoted, DIR_OUT, As::Forward, now).is_some()
        || conntrack::find(quoted, DIR_IN, As::Reply, now).is_some()
}
