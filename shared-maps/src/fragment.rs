//! `hf_frag_v1`: the verdict about a datagram's first fragment, which its later fragments get too.

/// Name of the map and its pin.
pub const NAME: &str = "hf_frag_v1";
/// Entries of the map (LRU): a new one displaces the least recently used one.
pub const MAX_ENTRIES: u32 = 8192;

/// Key: the fragmented datagram and its interface. A pod's fragments never match another pod's
/// entry.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FragmentKey {
    /// Source, network order; IPv4 in bytes 0..4.
    pub saddr: [u8; 16],
    /// Destination, network order; IPv4 in bytes 0..4.
    pub daddr: [u8; 16],
    /// IP identification (IPv4: 16 bits), as on the wire.
    pub id: u32,
    /// Interface from which the fragment came, or to which it goes.
    pub ifindex: u32,
    /// IP protocol of an IPv4 datagram. It is 0 for IPv6, where it may differ from fragment to
    /// fragment (RFC 8200, section 4.5).
    pub protocol: u8,
    /// [`crate::FAMILY_IPV4`] or [`crate::FAMILY_IPV6`].
    pub family: u8,
    /// [`crate::policy::EGRESS`] or [`crate::policy::INGRESS`].
    pub egress: u8,
    /// Padding, which is always zero, because it is part of the key.
    pub pad: u8,
}

/// Value: the first fragment's verdict.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FragmentValue {
    /// Arrival of the first fragment, nanoseconds of CLOCK_MONOTONIC.
    pub seen_at: u64,
    /// Mark for the later fragments; 0: none.
    pub mark: u32,
    /// 1 = pass, 0 = drop.
    pub pass: u32,
}
