//! The endpoint's policy map: which peer is allowed on which protocol and port.

use shared_maps::{
    Be16, IdentityId,
    event::Reason,
    policy::{
        EGRESS, FLAG_LPM_SHIFT, FULL_PREFIX_BITS, INGRESS, PRECEDENCE_DENY, PolicyKey, PolicyValue,
    },
    policystats::{PolicyStatsKey, PolicyStatsValue},
};

use crate::{
    config,
    maps::{self, POLICY_STATS},
    packet::Packet,
};

/// Judges a packet. Returns the proxy port (network order) to redirect to, 0 for none, or the
/// reason of a drop.
///
/// The entry of the exact identity and the entry of any identity compete. Higher precedence wins.
/// At equal precedence the longer prefix wins. A deny of the highest precedence for the exact
/// identity wins without a second lookup.
///
/// The port of a Service is not the port of its backends, and rules mean the latter. Of the entries
/// for any identity, a Service has only those for every protocol and port. The agent derives its
/// other entries from those of its backends.
#[inline(never)]
pub(crate) fn judge(packet: &Packet, identity: u32, egress: u8) -> Result<u16, Reason> {
    let (label, entry) = decides(packet.protocol, packet.policy_port(), identity, egress);
    let Some(entry) = entry else {
        return Err(Reason::PolicyDenied);
    };
    account(packet, label, egress, entry);
    if entry.is_deny() {
        return Err(Reason::PolicyDeny);
    }
    let proxy = entry.proxy_port.to_wire();
    if proxy != 0 && (egress != EGRESS || !packet.is_redirectable()) {
        return Err(Reason::PolicyDeny);
    }
    Ok(proxy)
}

/// Judges a packet that the node itself sends to the pod. It needs no entry, but a deny drops it.
#[inline(never)]
pub(crate) fn judge_of_node(packet: &Packet) -> Result<(), Reason> {
    let node = IdentityId::HOST.0;
    let (label, entry) = decides(packet.protocol, packet.policy_port(), node, INGRESS);
    match entry {
        Some(entry) if entry.is_deny() => {
            account(packet, label, INGRESS, entry);
            Err(Reason::PolicyDeny)
        }
        _ => Ok(()),
    }
}

/// Whether policy lets packets of a flow pass without the proxy. `port` is as
/// [`Packet::policy_port`] gives it. It counts nothing.
#[inline(never)]
pub(crate) fn allows(protocol: u8, port: u16, identity: u32, egress: u8) -> bool {
    decides(protocol, port, identity, egress)
        .1
        .is_some_and(|entry| !entry.is_deny() && entry.proxy_port.to_wire() == 0)
}

/// Whether policy redirects packets of a flow that the pod sends. It counts nothing.
#[inline(never)]
fn redirects_to(protocol: u8, port: u16, identity: u32) -> bool {
    decides(protocol, port, identity, EGRESS)
        .1
        .is_some_and(|entry| !entry.is_deny() && entry.proxy_port.to_wire() != 0)
}

/// Whether policy redirects the pod's packets to the sender of `packet`. It judges the packet as if
/// the pod replied to it. It counts nothing.
#[inline(never)]
pub(crate) fn redirects_replies_to(packet: &Packet) -> bool {
    if !packet.is_redirectable() {
        return false;
    }
    let identity = maps::identity_or_world(packet.saddr, packet.family);
    redirects_to(packet.protocol, packet.sport, identity)
}

/// Whether policy redirects a packet that the pod sends. It counts nothing.
#[inline(never)]
pub(crate) fn redirects(packet: &Packet) -> bool {
    if !packet.is_redirectable() {
        return false;
    }
    let identity = maps::identity_or_world(packet.daddr, packet.family);
    redirects_to(packet.protocol, packet.dport, identity)
}

/// The identity of the entry that decides, and the entry. `port` is in network order.
///
/// Entries stay in their map: before Linux 6.3 the verifier refuses to copy an absent value from the
/// stack, which the compiler does with an `Option` of a value.
#[inline(always)]
fn decides(
    protocol: u8,
    port: u16,
    identity: u32,
    egress: u8,
) -> (u32, Option<&'static PolicyValue>) {
    let exact = lookup(protocol, port, identity, egress);
    if let Some(entry) = exact
        && entry.precedence == PRECEDENCE_DENY
    {
        return (identity, exact);
    }
    let (protocol, port) = if IdentityId(identity).is_service() {
        (0, 0)
    } else {
        (protocol, port)
    };
    let any = lookup(protocol, port, 0, egress);
    match (exact, any) {
        (Some(_), None) => (identity, exact),
        (Some(entry), Some(other)) if !beats(other, entry) => (identity, exact),
        _ => (0, any),
    }
}

#[inline(always)]
fn beats(any: &PolicyValue, exact: &PolicyValue) -> bool {
    any.precedence > exact.precedence
        || (any.precedence == exact.precedence
            && any.flags >> FLAG_LPM_SHIFT > exact.flags >> FLAG_LPM_SHIFT)
}

#[inline(always)]
fn lookup(protocol: u8, port: u16, identity: u32, egress: u8) -> Option<&'static PolicyValue> {
    maps::policy(&PolicyKey {
        prefix_len: FULL_PREFIX_BITS,
        sec_label: identity,
        egress,
        protocol,
        dport: Be16::from_wire(port),
    })
}

/// Counts the packet for the entry that decided.
#[inline(always)]
fn account(packet: &Packet, label: u32, egress: u8, entry: &PolicyValue) {
    let prefix_len = entry.flags >> FLAG_LPM_SHIFT;
    let (protocol, port_bits) = if prefix_len < 8 {
        (0, 0)
    } else {
        (packet.protocol, u32::from(prefix_len - 8))
    };
    let mask = !(0xffff_u32 >> (port_bits & 31));
    let dport = u16::from_be(packet.policy_port()) & (mask as u16);
    let key = PolicyStatsKey {
        endpoint_id: config::id(),
        pad: 0,
        prefix_len,
        sec_label: label,
        egress,
        protocol,
        dport: Be16::new(dport),
    };
    if let Some(value) = POLICY_STATS.get_ptr_mut(key) {
        // SAFETY: the value is this CPU's own.
        unsafe {
            (*value).packets += 1;
            (*value).bytes += u64::from(packet.len);
        }
        return;
    }
    let first = PolicyStatsValue {
        packets: 1,
        bytes: u64::from(packet.len),
    };
    // A full map evicts; any other failure only loses a count.
    let _ = POLICY_STATS.insert(key, first, 0);
}
