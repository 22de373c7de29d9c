//! Each endpoint's quota of shared resources.

use aya_ebpf::{
    Global,
    helpers::{bpf_ktime_get_ns, bpf_map_pop_elem},
};
use shared_maps::{
    FAMILY_IPV6,
    endpoint::{Queue, QueueItem},
    event::{Counter, Reason},
    quota::{BURST_NS, CONNECTION_COST, HELD_UNTIL, Limit, QuotaKey, held_index, held_map},
};

use crate::{
    config, events,
    maps::{HELD, PROXY_CLOCKS, QUEUES, QUOTAS, SCRATCH},
    packet::{Packet, TCP},
};

/// Nanoseconds between two packets to the proxy; 0: no quota. Set by the loader.
#[unsafe(no_mangle)]
static PACKET_INTERVAL: Global<u32> = Global::new(0);

/// Whether a packet may go to the proxy now.
///
/// Datagrams and SYNs count, because each takes a place in a queue that all endpoints share. A SYN
/// counts for several datagrams, because a connection costs as much. Segments of a connection do
/// not count.
///
/// This is a token bucket in one number: the time at which the endpoint's packets so far would have
/// been sent at its rate.
#[inline(never)]
pub(crate) fn admits_to_proxy(packet: &Packet) -> bool {
    let mut interval = u64::from(PACKET_INTERVAL.load());
    if interval == 0 || (packet.protocol == TCP && !packet.is_syn()) {
        return true;
    }
    if packet.protocol == TCP {
        interval *= u64::from(CONNECTION_COST);
    }
    let Some(clock) = PROXY_CLOCKS.get_ptr_mut(config::slot()) else {
        return true;
    };
    // SAFETY: the helper has no preconditions.
    let now = unsafe { bpf_ktime_get_ns() };
    // SAFETY: two CPUs at once count one packet too few.
    let due = unsafe { clock.read_volatile() }.max(now);
    if due - now > BURST_NS {
        count(Limit::ToProxy, packet.len);
        return false;
    }
    // SAFETY: as above.
    unsafe { clock.write_volatile(due + interval) };
    true
}

/// Adds `item` at the end of an endpoint's queue. If the queue is full, its oldest item goes to
/// `displace` first. Returns false if there is still no room.
#[inline(always)]
pub(crate) fn admit<T: Copy>(queue: Queue, item: &T, displace: impl FnOnce(&T)) -> bool {
    const {
        assert!(size_of::<T>() <= size_of::<QueueItem>() && align_of::<T>() <= align_of::<u64>());
    }
    let (Some(scratch), Some(map)) = (
        SCRATCH.get_ptr_mut(0),
        QUEUES.get(queue.index(config::slot())),
    ) else {
        return false;
    };
    // SAFETY: the values are this CPU's own, and large enough. What the helper fills in is a `T`
    // that was pushed.
    unsafe {
        let new = &raw mut (*scratch).item;
        new.cast::<T>().write(*item);
        if map.push(&*new, 0).is_ok() {
            return true;
        }
        let oldest = &raw mut (*scratch).displaced;
        let of_kernel = core::ptr::from_ref(map).cast_mut();
        if bpf_map_pop_elem(of_kernel.cast(), oldest.cast()) == 0 {
            displace(&*oldest.cast::<T>());
        }
        map.push(&*new, 0).is_ok()
    }
}

/// Counts an entry that was displaced before its time.
#[inline(always)]
pub(crate) fn displaced(limit: Limit) {
    events::count(Reason::Displaced, 0);
    count(limit, 0);
}

/// Whether the endpoint may hold one more answered connection of the packet's kind, which is so
/// while it holds fewer than are free. A single endpoint gets half of the map. With `n` endpoints
/// that take all they can, each gets one part of `n + 1`.
#[inline(never)]
pub(crate) fn hold(packet: &Packet, now: u32) -> bool {
    let map = map(packet);
    let (Some(until), Some(free), Some(held)) = (
        HELD.get_ptr_mut(HELD_UNTIL),
        HELD.get_ptr_mut(held_index(0, map)),
        HELD.get_ptr_mut(held_index(config::id(), map)),
    ) else {
        return true;
    };
    // SAFETY: two CPUs at once may lose a count until the agent counts again.
    unsafe {
        if now > until.read_volatile() {
            return true;
        }
        let (free_now, held_now) = (free.read_volatile(), held.read_volatile());
        if held_now >= free_now {
            count(Limit::Connections, packet.len);
            return false;
        }
        free.write_volatile(free_now - 1);
        held.write_volatile(held_now + 1);
    }
    true
}

/// The endpoint holds one answered connection fewer.
#[inline(never)]
pub(crate) fn release(packet: &Packet) {
    let map = map(packet);
    let (Some(free), Some(held)) = (
        HELD.get_ptr_mut(held_index(0, map)),
        HELD.get_ptr_mut(held_index(config::id(), map)),
    ) else {
        return;
    };
    // SAFETY: as in `hold`.
    unsafe {
        let held_now = held.read_volatile();
        if held_now != 0 {
            held.write_volatile(held_now - 1);
            free.write_volatile(free.read_volatile() + 1);
        }
    }
}

#[inline(always)]
fn map(packet: &Packet) -> u32 {
    held_map(packet.protocol == TCP, packet.family == FAMILY_IPV6)
}

/// Counts an attempt over a quota.
#[inline(never)]
pub(crate) fn count(limit: Limit, bytes: u32) {
    let key = QuotaKey {
        endpoint: config::id(),
        limit: limit as u8,
        pad: 0,
    };
    if let Some(counter) = QUOTAS.get_ptr_mut(key) {
        // SAFETY: the value is this CPU's own.
        unsafe {
            (*counter).packets += 1;
            (*counter).bytes += u64::from(bytes);
        }
        return;
    }
    let first = Counter {
        packets: 1,
        bytes: u64::from(bytes),
    };
    // A full map evicts; any other failure only loses a count.
    let _ = QUOTAS.insert(key, first, 0);
}
