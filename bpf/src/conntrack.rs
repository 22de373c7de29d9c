//! Connection tracking in Cilium's maps, by which the programs recognise replies.

use aya_ebpf::helpers::bpf_ktime_get_ns;
use shared_maps::{
    Be16, FAMILY_IPV4,
    conntrack::{
        CtKey4, CtKey6, CtValue, DIR_IN, DIR_OUT, FLAG_ANSWERED, FLAG_FROM_PROXY,
        FLAG_PROXY_REDIRECT, FLAG_RX_CLOSING, FLAG_SEEN_NON_SYN, FLAG_TX_CLOSING, LIFETIME_ANY,
        LIFETIME_CLOSE, LIFETIME_SYN, LIFETIME_TCP,
    },
};

use crate::{
    maps::{CT_ANY4, CT_ANY6, CT_TCP4, CT_TCP6},
    packet::{Packet, TCP, TCP_FIN, TCP_RST, TCP_SYN, UDP},
    quota, unanswered,
};

pub(crate) const CLOSED: u16 = FLAG_RX_CLOSING | FLAG_TX_CLOSING;
/// Flags that say who opened the flow and where it goes.
const KIND: u16 = FLAG_PROXY_REDIRECT | FLAG_FROM_PROXY;

/// Seconds of the clock that lifetimes are in.
#[inline(always)]
pub(crate) fn now() -> u32 {
    // SAFETY: the helper has no preconditions.
    (unsafe { bpf_ktime_get_ns() } / 1_000_000_000) as u32
}

/// Which side of the connection sent a packet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// The endpoint.
    Local,
    /// The other side.
    Remote,
}

/// How a packet relates to the connection of the entry.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum As {
    /// It has the direction of the connection's first packet.
    Forward,
    /// It has the opposite direction.
    Reply,
}

/// Key of the connection of `packet`.
macro_rules! key {
    ($key:ident, $addr:ident, $packet:expr, $direction:expr, $role:expr) => {{
        let (daddr, saddr, dport, sport) = match $role {
            As::Forward => ($packet.saddr, $packet.daddr, $packet.dport, $packet.sport),
            As::Reply => ($packet.daddr, $packet.saddr, $packet.sport, $packet.dport),
        };
        $key {
            daddr: daddr.$addr(),
            saddr: saddr.$addr(),
            dport: Be16::from_wire(dport),
            sport: Be16::from_wire(sport),
            nexthdr: $packet.protocol,
            flags: $direction,
        }
    }};
}

// Not inlined, like others below. Each such function has a stack frame of its own, and the frames
// of one call chain must stay within 512 bytes together.
#[inline(never)]
fn entry(packet: &Packet, direction: u8, role: As) -> *mut CtValue {
    let found = if packet.family == FAMILY_IPV4 {
        let key = key!(CtKey4, v4_bytes, packet, direction, role);
        if packet.protocol == TCP {
            CT_TCP4.get_ptr_mut(key)
        } else {
            CT_ANY4.get_ptr_mut(key)
        }
    } else {
        let key = key!(CtKey6, bytes, packet, direction, role);
        if packet.protocol == TCP {
            CT_TCP6.get_ptr_mut(key)
        } else {
            CT_ANY6.get_ptr_mut(key)
        }
    };
    found.unwrap_or(core::ptr::null_mut())
}

/// The live connection of `packet`. Does not touch it.
#[inline(always)]
pub(crate) fn find(packet: &Packet, direction: u8, role: As, now: u32) -> Option<*mut CtValue> {
    let value = entry(packet, direction, role);
    if value.is_null() {
        return None;
    }
    // SAFETY: map values live as long as the program runs; racing writers
    // leave old or new numbers, both good.
    (unsafe { (*value).lifetime } >= now).then_some(value)
}

/// Whether a program of an earlier release redirected the flow of `value` to the proxy.
#[inline(always)]
pub(crate) fn is_redirected(value: *mut CtValue) -> bool {
    // SAFETY: as in `find`.
    unsafe { (*value).flags & FLAG_PROXY_REDIRECT != 0 }
}

/// Whether the other side opened the connection of `value`. Packets of the pod are then replies,
/// even if policy redirects packets in that direction.
///
/// A TCP segment opens a connection only if it is a SYN. A datagram opens none, because with it a
/// server could turn the pod's later queries into replies. The only exception is a query of this
/// node's proxy.
#[inline(always)]
pub(crate) fn is_opened(value: *mut CtValue, packet: &Packet) -> bool {
    // SAFETY: as in `find`.
    let (flags, seen) = unsafe { ((*value).flags, (*value).rx_flags_seen) };
    match packet.protocol {
        TCP => seen & TCP_SYN != 0,
        UDP => flags & FLAG_FROM_PROXY != 0,
        _ => true,
    }
}

/// Records a packet in its connection's entry: counters, TCP state, lifetime.
#[inline(always)]
pub(crate) fn touch(value: *mut CtValue, packet: &Packet, side: Side, role: As, now: u32) {
    // SAFETY: as in `find`. Two CPUs at once may lose a count (the target has
    // no atomic addition); flags are only ever set, and a lost one is set
    // again by the next packet.
    unsafe {
        (*value).packets += 1;
        (*value).bytes += u64::from(packet.len);
        let before = (*value).flags;
        let mut flags = before;
        let lifetime = if packet.protocol == TCP {
            if side == Side::Local {
                (*value).tx_flags_seen |= packet.tcp_flags;
            } else {
                (*value).rx_flags_seen |= packet.tcp_flags;
            }
            tcp_state(&mut flags, packet, side, now, (*value).lifetime)
        } else {
            now + LIFETIME_ANY
        };
        let open = flags & CLOSED != CLOSED;
        if open && flags & FLAG_ANSWERED == 0 {
            let answered = if packet.protocol == TCP {
                (*value).tx_flags_seen != 0
                    && (*value).rx_flags_seen != 0
                    && flags & FLAG_SEEN_NON_SYN != 0
            } else {
                role == As::Reply
            };
            if answered && quota::hold(packet, now) {
                flags |= FLAG_ANSWERED;
            }
        } else if !open && before & CLOSED != CLOSED && flags & FLAG_ANSWERED != 0 {
            quota::release(packet);
            // The closed entry stays for a while and is bounded like a new one.
            let direction = if (side == Side::Local) == (role == As::Forward) {
                DIR_OUT
            } else {
                DIR_IN
            };
            if unanswered::admit(packet, direction, role) {
                flags &= !FLAG_ANSWERED;
            }
        }
        if flags != before {
            (*value).flags = flags;
        }
        if lifetime != (*value).lifetime {
            (*value).lifetime = lifetime;
        }
    }
}

/// New state of a TCP connection; `old` is its lifetime before.
#[inline(always)]
fn tcp_state(flags: &mut u16, packet: &Packet, side: Side, now: u32, old: u32) -> u32 {
    if packet.tcp_flags & TCP_SYN == 0 {
        *flags |= FLAG_SEEN_NON_SYN;
    }
    if *flags & CLOSED == CLOSED {
        return old;
    }
    if packet.tcp_flags & TCP_RST != 0 {
        *flags |= CLOSED;
    } else if packet.tcp_flags & TCP_FIN != 0 {
        *flags |= match side {
            Side::Local => FLAG_TX_CLOSING,
            Side::Remote => FLAG_RX_CLOSING,
        };
    }
    now + if *flags & CLOSED == CLOSED {
        LIFETIME_CLOSE
    } else if *flags & FLAG_SEEN_NON_SYN != 0 {
        LIFETIME_TCP
    } else {
        LIFETIME_SYN
    }
}

/// Removes the entry of the connection that the pod opened with `packet`. From now on its packets
/// go to the proxy and have no entry, and the server's direct answers are no longer replies.
#[inline(always)]
pub(crate) fn end(packet: &Packet) {
    let value = entry(packet, DIR_OUT, As::Forward);
    if !value.is_null() {
        // SAFETY: as in `find`.
        unsafe { (*value).lifetime = 0 };
    }
}

/// Result of [`forward`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Forwarded {
    /// The connection was there.
    Known,
    /// A new entry was made.
    New,
    /// The connection is new, and no entry could be made.
    Full,
}

/// Records a forward packet that policy allows, and makes the entry if there is none. `kind` is 0
/// or `FLAG_FROM_PROXY`.
#[inline(never)]
pub(crate) fn forward(
    packet: &Packet,
    direction: u8,
    side: Side,
    kind: u16,
    source_identity: u32,
) -> Forwarded {
    let now = now();
    let value = entry(packet, direction, As::Forward);
    if !value.is_null() {
        // SAFETY: as in `find`.
        unsafe {
            let flags = (*value).flags;
            let ended = (*value).lifetime < now
                || (packet.is_syn() && flags & (FLAG_RX_CLOSING | FLAG_TX_CLOSING) != 0);
            if ended {
                if flags & FLAG_ANSWERED != 0 && flags & CLOSED != CLOSED {
                    quota::release(packet);
                }
                // This entry may be the oldest of the full queue. The queue spares answered
                // entries.
                (*value).flags = flags | FLAG_ANSWERED;
                let admitted = unanswered::admit(packet, direction, As::Forward);
                (*value).flags = if admitted {
                    kind
                } else {
                    flags & !FLAG_ANSWERED
                };
                if !admitted {
                    return Forwarded::Full;
                }
                (*value).tx_flags_seen = 0;
                (*value).rx_flags_seen = 0;
                (*value).packets = 0;
                (*value).bytes = 0;
            } else if flags & KIND != kind {
                (*value).flags = flags & !KIND | kind;
            }
            (*value).src_sec_id = source_identity;
            touch(value, packet, side, As::Forward, now);
            return if ended {
                Forwarded::New
            } else {
                Forwarded::Known
            };
        }
    }
    if !unanswered::admit(packet, direction, As::Forward) {
        return Forwarded::Full;
    }
    let mut flags = kind;
    let lifetime = if packet.protocol == TCP {
        tcp_state(&mut flags, packet, side, now, 0)
    } else {
        now + LIFETIME_ANY
    };
    let (tx, rx) = match side {
        Side::Local => (packet.tcp_flags, 0),
        Side::Remote => (0, packet.tcp_flags),
    };
    let value = CtValue {
        nat_addr: [0; 2],
        packets: 1,
        bytes: u64::from(packet.len),
        lifetime,
        flags,
        rev_nat_index: 0,
        nat_port: Be16::ZERO,
        tx_flags_seen: tx,
        rx_flags_seen: rx,
        src_sec_id: source_identity,
        last_tx_report: 0,
        last_rx_report: 0,
    };
    let made = if packet.family == FAMILY_IPV4 {
        let key = key!(CtKey4, v4_bytes, packet, direction, As::Forward);
        if packet.protocol == TCP {
            CT_TCP4.insert(key, value, 0)
        } else {
            CT_ANY4.insert(key, value, 0)
        }
    } else {
        let key = key!(CtKey6, bytes, packet, direction, As::Forward);
        if packet.protocol == TCP {
            CT_TCP6.insert(key, value, 0)
        } else {
            CT_ANY6.insert(key, value, 0)
        }
    };
    if made.is_ok() {
        Forwarded::New
    } else {
        Forwarded::Full
    }
}
