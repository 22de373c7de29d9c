//! Redirected flows of the last seconds.
//!
//! Packets to the proxy have no connection entry. This table, which all endpoints share, shows
//! whether a datagram is the first of its flow. `observe` then gets one record of a flow instead of
//! one of each query. If another flow displaces a flow from its place, the flow is recorded again.

use crate::{
    config, conntrack,
    maps::{RECENT, RECENT_FLOWS},
    packet::{Packet, TCP},
};

/// How long after its last packet a flow counts as recent, seconds.
const KNOWN: u64 = 15;

/// Whether a redirected packet begins a flow. Records the flow.
#[inline(never)]
pub(crate) fn is_new(packet: &Packet) -> bool {
    if packet.protocol == TCP {
        return packet.is_syn();
    }
    let now = u64::from(conntrack::now());
    let hash = hash(packet);
    let Some(place) = RECENT.get_ptr_mut((hash >> 32) as u32 & (RECENT_FLOWS - 1)) else {
        return true;
    };
    let flow = hash & 0xffff_ffff;
    // SAFETY: two CPUs at once leave the flow of one of them.
    let before = unsafe { place.read_volatile() };
    // SAFETY: as above.
    unsafe { place.write_volatile(now << 32 | flow) };
    before & 0xffff_ffff != flow || now.saturating_sub(before >> 32) > KNOWN
}

/// FNV-1a over words, and a last mix so that the upper half depends on every bit.
#[inline(always)]
fn hash(packet: &Packet) -> u64 {
    let [a, b, c, d] = packet.daddr.0;
    let ports = u32::from(packet.sport) << 16 | u32::from(packet.dport);
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for word in [a, b, c, d, ports, u32::from(packet.family), config::slot()] {
        hash = (hash ^ u64::from(word)).wrapping_mul(0x0100_0000_01b3);
    }
    hash ^= hash >> 29;
    hash = hash.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash ^ (hash >> 32)
}
