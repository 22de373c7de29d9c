//! Fragments follow the verdict on the first of them.

use aya_ebpf::helpers::bpf_ktime_get_ns;
use shared_maps::{
    FAMILY_IPV4,
    endpoint::Queue,
    event::Reason,
    fragment::{FragmentKey, FragmentValue},
    quota::Limit,
};

use crate::{config, maps::FRAGMENTS, packet::Packet, quota};

/// How long the verdict of a first fragment is valid for the rest, nanoseconds: as long as the
/// stack waits for them (`net.ipv4.ipfrag_time`).
const LIFETIME_NS: u64 = 30_000_000_000;

#[inline(always)]
fn key(packet: &Packet, egress: u8) -> FragmentKey {
    FragmentKey {
        saddr: packet.saddr.bytes(),
        daddr: packet.daddr.bytes(),
        id: packet.fragment_id,
        ifindex: config::ifindex(),
        // In IPv6 the field may differ from fragment to fragment (RFC 8200, section 4.5).
        protocol: if packet.family == FAMILY_IPV4 {
            packet.protocol
        } else {
            0
        },
        family: packet.family,
        egress,
        pad: 0,
    }
}

/// Records the verdict of a first fragment. If it returns false, the later fragments will be
/// dropped.
#[inline(never)]
pub(crate) fn remember(packet: &Packet, egress: u8, mark: u32, pass: bool) -> bool {
    let value = FragmentValue {
        // SAFETY: the helper has no preconditions.
        seen_at: unsafe { bpf_ktime_get_ns() },
        mark,
        pass: u32::from(pass),
    };
    let key = key(packet, egress);
    let known = FRAGMENTS.get_ptr(key).is_some();
    (known || quota::admit(Queue::Fragments, &key, displace))
        && FRAGMENTS.insert(key, value, 0).is_ok()
}

/// Fragments of one datagram arrive within this time of the first, nanoseconds.
const TOGETHER_NS: u64 = 1_000_000_000;

#[inline(never)]
fn displace(key: &FragmentKey) {
    let Some(value) = FRAGMENTS.get_ptr(*key) else {
        return;
    };
    // SAFETY: the helper has no preconditions; map values live as long as the program runs.
    let age = unsafe { bpf_ktime_get_ns().saturating_sub((*value).seen_at) };
    if FRAGMENTS.remove(*key).is_ok() && age < TOGETHER_NS {
        quota::displaced(Limit::Fragments);
    }
}

/// Mark for a later fragment, or the reason why it is dropped.
#[inline(never)]
pub(crate) fn follow(packet: &Packet, egress: u8) -> Result<u32, Reason> {
    // SAFETY: racing writers leave an old or a new verdict of the same datagram.
    let value = unsafe { FRAGMENTS.get(key(packet, egress)) }.ok_or(Reason::FragmentUnknown)?;
    // SAFETY: the helper has no preconditions.
    if unsafe { bpf_ktime_get_ns() }.saturating_sub(value.seen_at) > LIFETIME_NS {
        return Err(Reason::FragmentUnknown);
    }
    if value.pass == 0 {
        return Err(Reason::PolicyDenied);
    }
    Ok(value.mark)
}
