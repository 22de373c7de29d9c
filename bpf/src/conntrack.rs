//! Connection tracking in Cilium's maps, by which the programs recognise replies.
//!
//! A reply is one only while policy allows the direction that opened the connection. So an entry has
//! the second in which policy allowed that direction last, and the first reply of another second is
//! judged again. An entry also has the number of its endpoint: a later pod with the same address does
//! not inherit the connections of an earlier one.

use aya_ebpf::helpers::bpf_ktime_get_ns;
use shared_maps::{
    Be16, FAMILY_IPV4, IdentityId,
    conntrack::{
        CtKey4, CtKey6, CtValue, DIR_IN, DIR_OUT, FLAG_ANSWERED, FLAG_FROM_PROXY, FLAG_FROM_TUNNEL,
        FLAG_RX_CLOSING, FLAG_SEEN_NON_SYN, FLAG_TX_CLOSING, LIFETIME_ANY, LIFETIME_CLOSE,
        LIFETIME_SYN, LIFETIME_TCP, REFUSED,
    },
    policy::{EGRESS, INGRESS},
};

use crate::{
    config,
    maps::{self, CT_ANY4, CT_ANY6, CT_TCP4, CT_TCP6},
    packet::{Packet, TCP, TCP_FIN, TCP_RST, TCP_SYN, UDP},
    policy, quota, unanswered,
};

pub(crate) const CLOSED: u16 = FLAG_RX_CLOSING | FLAG_TX_CLOSING;

/// Flags that say who opened a connection.
const KINDS: u16 = FLAG_FROM_PROXY | FLAG_FROM_TUNNEL;

/// Seconds of the clock that lifetimes are in.
#[inline(always)]
pub(crate) fn now() -> u32 {
    // SAFETY: the helper has no preconditions.
    (unsafe { bpf_ktime_get_ns() } / 1_000_000_000) as u32
}

/// Which side of the connection sent a packet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// The endpoint whose program runs.
    Local,
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

/// The connection of a packet.
#[derive(Clone, Copy)]
pub(crate) enum Tracked {
    /// There is no entry, or it has expired.
    No,
    /// Policy no longer allows the direction that opened it.
    Refused(*mut CtValue),
    /// It lives, and policy allows it.
    Live(*mut CtValue),
}

/// The live connection of `packet`, if policy still allows it.
#[inline(always)]
pub(crate) fn find(packet: &Packet, direction: u8, role: As, now: u32) -> Option<*mut CtValue> {
    match look(packet, direction, role, now) {
        Tracked::Live(value) => Some(value),
        Tracked::Refused(_) | Tracked::No => None,
    }
}

/// The connection of `packet`. Does not touch it.
///
/// A refused entry stays until its time is over. Without it, the next packet would begin a connection
/// in its own direction, which policy may allow, and the other side's packets would be replies.
#[inline(always)]
pub(crate) fn look(packet: &Packet, direction: u8, role: As, now: u32) -> Tracked {
    let value = entry(packet, direction, role);
    if value.is_null() {
        return Tracked::No;
    }
    // SAFETY: map values live as long as the program runs; racing writers
    // leave old or new numbers, both good.
    let (lifetime, judged, owner) = unsafe {
        (
            (*value).lifetime,
            (*value).last_tx_report,
            (*value).last_rx_report,
        )
    };
    if lifetime < now {
        return Tracked::No;
    }
    if owner != u32::from(config::id()) {
        return Tracked::No;
    }
    if judged == now {
        return Tracked::Live(value);
    }
    if !is_still_allowed(value, packet, direction, role) {
        // SAFETY: as above.
        unsafe { (*value).last_tx_report = REFUSED };
        return Tracked::Refused(value);
    }
    judged_now(value, now);
    Tracked::Live(value)
}

/// Records that policy allows the direction that opened the connection, which is this endpoint's.
#[inline(always)]
fn judged_now(value: *mut CtValue, now: u32) {
    let own = u32::from(config::id());
    // SAFETY: as in `find`.
    unsafe {
        if (*value).last_tx_report != now {
            (*value).last_tx_report = now;
        }
        if (*value).last_rx_report != own {
            (*value).last_rx_report = own;
        }
    }
}

/// Whether policy allows the direction that opened the connection of `value`. `packet` belongs to
/// the connection. It counts nothing.
#[inline(never)]
fn is_still_allowed(value: *mut CtValue, packet: &Packet, direction: u8, role: As) -> bool {
    let port = match role {
        As::Forward => packet.policy_port(),
        As::Reply => packet.port_of_opposite(),
    };
    let from_sender = (direction == DIR_IN) == (role == As::Forward);
    let remote = if from_sender {
        packet.saddr
    } else {
        packet.daddr
    };
    let identity = maps::identity_or_world(remote, packet.family);
    if direction == DIR_OUT {
        return policy::allows(packet.protocol, port, identity, EGRESS);
    }
    // SAFETY: as in `find`.
    let (flags, opened_by) = unsafe { ((*value).flags, (*value).src_sec_id) };
    // Policy does not judge the node.
    if opened_by == IdentityId::HOST.0 {
        return true;
    }
    // The ipcache does not know who opened it: a proxy, or a pod that names itself. The node's address is
    // also that of connections that it opened for others.
    let identity = if flags & KINDS != 0 || identity == IdentityId::HOST.0 {
        opened_by
    } else {
        identity
    };
    policy::allows(packet.protocol, port, identity, INGRESS)
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

/// How [`forward`] recorded the packet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Forwarded {
    /// The connection had an entry.
    Known,
    /// A new entry was made.
    New,
    /// The connection is new, and no entry could be made.
    Full,
}

/// Records a forward packet that policy allows, and makes the entry if there is none. `kind` is 0
/// or one of [`KINDS`].
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
            let inherited = (*value).last_rx_report != u32::from(config::id());
            let ended = inherited
                || (*value).lifetime < now
                || (packet.is_syn() && flags & (FLAG_RX_CLOSING | FLAG_TX_CLOSING) != 0);
            if ended {
                if !inherited && flags & FLAG_ANSWERED != 0 && flags & CLOSED != CLOSED {
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
            } else if flags & KINDS != kind {
                (*value).flags = flags & !KINDS | kind;
            }
            (*value).src_sec_id = source_identity;
            judged_now(value, now);
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
        last_tx_report: now,
        last_rx_report: u32::from(config::id()),
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
