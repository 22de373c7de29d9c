//! Connections that are unanswered, or that both sides closed.
//!
//! They are in Cilium's maps like all others, so that other readers of those maps find them. Each
//! endpoint has a queue of them for each direction. If the queue is full, a new one displaces the
//! oldest one that is still unanswered. A flood of an endpoint therefore displaces only entries of
//! its own.

use shared_maps::{
    Be16, FAMILY_IPV6,
    conntrack::{CtKey4, CtKey6, CtValue, DIR_OUT, FLAG_ANSWERED},
    endpoint::Queue,
    quota::Limit,
};

use crate::{
    conntrack::{As, CLOSED},
    maps::{CT_ANY4, CT_ANY6, CT_TCP4, CT_TCP6, SCRATCH},
    packet::{Packet, TCP},
    quota,
};

/// Key of a connection entry of either family; IPv4 addresses as in [`crate::address::Address`].
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Flow {
    key: CtKey6,
    family: u8,
    pad: u8,
}

/// Makes room for the entry of a packet's connection and adds it to the queue. Returns false if
/// there is no room.
#[inline(never)]
pub(crate) fn admit(packet: &Packet, direction: u8, role: As) -> bool {
    let Some(scratch) = SCRATCH.get_ptr_mut(0) else {
        return false;
    };
    // SAFETY: the value is this CPU's own until the program ends.
    let flow = unsafe { &mut (*scratch).flow };
    if role == As::Forward {
        flow.key.daddr = packet.saddr.bytes();
        flow.key.saddr = packet.daddr.bytes();
        flow.key.dport = Be16::from_wire(packet.dport);
        flow.key.sport = Be16::from_wire(packet.sport);
    } else {
        flow.key.daddr = packet.daddr.bytes();
        flow.key.saddr = packet.saddr.bytes();
        flow.key.dport = Be16::from_wire(packet.sport);
        flow.key.sport = Be16::from_wire(packet.dport);
    }
    flow.key.nexthdr = packet.protocol;
    flow.key.flags = direction;
    flow.family = packet.family;
    flow.pad = 0;
    let queue = if direction == DIR_OUT {
        Queue::UnansweredOut
    } else {
        Queue::UnansweredIn
    };
    quota::admit(queue, flow, displace)
}

#[inline(never)]
fn displace(flow: &Flow) {
    if flow.family == FAMILY_IPV6 {
        let key = flow.key;
        let map = if key.nexthdr == TCP {
            &CT_TCP6
        } else {
            &CT_ANY6
        };
        if let Some(lost) = map.get_ptr(key).and_then(is_lost)
            && map.remove(key).is_ok()
            && lost
        {
            quota::displaced(Limit::Unanswered);
        }
        return;
    }
    let (daddr, saddr) = (flow.key.daddr, flow.key.saddr);
    let key = CtKey4 {
        daddr: [daddr[0], daddr[1], daddr[2], daddr[3]],
        saddr: [saddr[0], saddr[1], saddr[2], saddr[3]],
        dport: flow.key.dport,
        sport: flow.key.sport,
        nexthdr: flow.key.nexthdr,
        flags: flow.key.flags,
    };
    let map = if key.nexthdr == TCP {
        &CT_TCP4
    } else {
        &CT_ANY4
    };
    if let Some(lost) = map.get_ptr(key).and_then(is_lost)
        && map.remove(key).is_ok()
        && lost
    {
        quota::displaced(Limit::Unanswered);
    }
}

/// Whether removing the entry loses an answer. `None` if it was answered and stays.
#[inline(always)]
fn is_lost(value: *const CtValue) -> Option<bool> {
    // SAFETY: map values live as long as the program runs.
    let flags = unsafe { (*value).flags };
    (flags & FLAG_ANSWERED == 0).then_some(flags & CLOSED != CLOSED)
}
