//! Counts every packet, and writes records to the ring buffer within a budget.

use aya_ebpf::{bindings::BPF_RB_NO_WAKEUP, helpers::bpf_ktime_get_ns};
use shared_maps::{
    Be16,
    event::{Event, HAS_ICMP_TYPE, Reason},
};

use crate::{
    config,
    maps::{BUDGETS, Budget, COUNTERS, EVENTS},
    packet::{Fragment, Packet},
};

/// Drop records per second, endpoint, reason and CPU.
const DROPS_PER_SECOND: u64 = 64;
/// Records of new connections that pass, per second, endpoint, reason and CPU.
const VERDICTS_PER_SECOND: u64 = 32;
/// Unread bytes at which the reader is woken. Waking it for each record would cost more.
const WAKE_AT: u64 = 16 * 1024;
/// `BPF_RB_AVAIL_DATA`.
const AVAILABLE: u64 = 0;

/// Adds one packet and its bytes to the counter of `reason`.
#[inline(always)]
pub(crate) fn count(reason: Reason, bytes: u32) {
    if let Some(counter) = COUNTERS.get_ptr_mut(reason as u32) {
        // SAFETY: the value is this CPU's own.
        unsafe {
            (*counter).packets += 1;
            (*counter).bytes += u64::from(bytes);
        }
    }
}

#[inline(always)]
fn within_budget(reason: Reason, now: u64) -> bool {
    let limit = if reason.is_drop() {
        DROPS_PER_SECOND
    } else {
        VERDICTS_PER_SECOND
    };
    let second = now / 1_000_000_000;
    let key = config::slot() << 8 | reason as u32;
    let Some(budget) = BUDGETS.get_ptr_mut(key) else {
        return BUDGETS.insert(key, Budget { second, used: 1 }, 0).is_ok();
    };
    // SAFETY: the value is this CPU's own.
    unsafe {
        if (*budget).second != second {
            (*budget).second = second;
            (*budget).used = 0;
        }
        (*budget).used += 1;
        (*budget).used <= limit
    }
}

/// Writes a record of `packet`, unless the budget is spent or the ring is full.
#[inline(never)]
pub(crate) fn record(packet: &Packet, reason: Reason, egress: u8, remote_identity: u32) {
    // SAFETY: the helper has no preconditions.
    let now = unsafe { bpf_ktime_get_ns() };
    if !within_budget(reason, now) {
        return;
    }
    let Some(mut entry) = EVENTS.reserve::<Event>(0) else {
        count(Reason::EventLost, packet.len);
        return;
    };
    let has_type = packet.is_icmp() && !matches!(packet.fragment, Fragment::Later);
    entry.write(Event {
        time: now,
        saddr: packet.saddr.bytes(),
        daddr: packet.daddr.bytes(),
        remote_identity,
        ifindex: config::ifindex(),
        len: packet.len,
        sport: Be16::from_wire(packet.sport),
        dport: Be16::from_wire(packet.dport),
        endpoint: config::id(),
        reason: reason as u8,
        family: packet.family,
        protocol: packet.protocol,
        egress,
        flags: if has_type { HAS_ICMP_TYPE } else { 0 },
        icmp_type: packet.icmp_type,
        pad: [0; 8],
    });
    let wake = if EVENTS.query(AVAILABLE) >= WAKE_AT {
        0
    } else {
        u64::from(BPF_RB_NO_WAKEUP)
    };
    entry.submit(wake);
}
