//! `hf_sources_v1`: identities that wrapped packets named, by the source of the packet.
//!
//! `from_net` writes an entry when it unwraps a packet, and `to_pod` reads it. The identity does not
//! travel in the packet's mark, because rules of other systems rewrite marks.

/// Name of the map and its pin.
pub const NAME: &str = "hf_sources_v1";
/// Entries of the map (LRU): a new one displaces the least recently used one.
pub const MAX_ENTRIES: u32 = 65_536;

/// A tick of the entries' clock is 2^24 ns (16.8 ms). The clock is back at the same number after
/// two years.
const TICK_BITS: u32 = 24;
/// Ticks for which an entry counts: two seconds.
const FRESH: u32 = 119;
/// Ticks after which an entry is written again: half a second.
const RENEWED: u32 = 29;

/// Key: the source of wrapped packets.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SourceKey {
    /// IPv4 address, network order.
    pub ip: [u8; 4],
}

/// Value: what the last wrapped packet of the source said.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SourceValue {
    /// Identity of the sender.
    pub identity: u32,
    /// When it was noted; see [`tick`].
    pub seen: u32,
}

/// The time of the entries, from nanoseconds of CLOCK_MONOTONIC.
#[inline(always)]
#[expect(
    clippy::cast_possible_truncation,
    reason = "the number of ticks begins again at zero"
)]
pub const fn tick(ns: u64) -> u32 {
    (ns >> TICK_BITS) as u32
}

impl SourceValue {
    /// Whether the entry counts at `now`.
    #[inline(always)]
    pub const fn is_fresh(self, now: u32) -> bool {
        self.is_within(FRESH, now)
    }

    /// How long ago the entry was written, in milliseconds; it is exact to a tick.
    pub const fn age_ms(self, now: u32) -> u64 {
        ((now.wrapping_sub(self.seen) as u64) << TICK_BITS) / 1_000_000
    }

    /// Whether the entry says `identity` and need not be written again yet.
    #[inline(always)]
    pub const fn says(self, identity: u32, now: u32) -> bool {
        self.identity == identity && self.is_within(RENEWED, now)
    }

    /// An entry of the next tick was written by another CPU after `now` was read.
    #[inline(always)]
    const fn is_within(self, ticks: u32, now: u32) -> bool {
        now.wrapping_sub(self.seen).wrapping_add(1) <= ticks + 1
    }
}
