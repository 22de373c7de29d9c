//! Each endpoint's quota of the resources that endpoints share in the datapath.
//!
//! - `hf_quota_v1` counts the attempts of an endpoint over a quota, by [`Limit`].
//! - `hf_held_v1` has the number of answered connections that each endpoint holds in each
//!   connection tracking map, and the number of free entries. The programs update the counts
//!   between two scans of the agent. Each scan sets them again.

/// Counters: pin and map name.
pub const NAME: &str = "hf_quota_v1";
/// Entries of the counters (LRU, per CPU).
pub const MAX_ENTRIES: u32 = 8192;

/// Symbol of the global with the nanoseconds between two packets of an endpoint to the proxy
/// (`u32`); 0: no quota.
pub const PACKET_INTERVAL: &str = "PACKET_INTERVAL";
/// Largest burst of an endpoint, in nanoseconds of its rate: the packets of a quarter of a second
/// at once.
pub const BURST_NS: u64 = 250_000_000;

/// Datagrams that a new TCP connection to the proxy counts for: about its cost for the node.
pub const CONNECTION_COST: u32 = 8;

/// Nanoseconds between two replies to denied packets of an endpoint, at most 1,000 per second: more
/// than clients need that stop at the first one, and little work for the node.
pub const DENY_RESPONSE_INTERVAL_NS: u64 = 1_000_000;

crate::words! {
    /// A resource with a quota.
    #[repr(u8)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Limit {
        /// Packets to the DNS proxy per second. A SYN counts as [`CONNECTION_COST`]. Packets over the
        /// quota are dropped.
        ToProxy = 0 => "packets_to_proxy",
        /// Unanswered connections. The next one displaces the oldest.
        Unanswered = 1 => "unanswered_connections",
        /// Datagrams with fragments in transit. The next one displaces the oldest.
        Fragments = 2 => "fragmented_datagrams",
        /// Servers and ports in `hf_redirect_v2`. The next one displaces the oldest.
        Servers = 3 => "dns_servers",
        /// Answered connections. The next one counts as unanswered.
        Connections = 4 => "connections",
        /// Replies to denied packets per second. Packets over the quota are dropped without a reply.
        DenyResponses = 5 => "deny_responses",
    }
}

/// Key of the counters. The value is [`crate::event::Counter`], per CPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct QuotaKey {
    /// Number of the endpoint on this node.
    pub endpoint: u16,
    /// Number of the [`Limit`] that was exceeded.
    pub limit: u8,
    /// Padding, which is always zero, because it is part of the key.
    pub pad: u8,
}

/// Connections held: pin and map name (array of `u32`).
pub const HELD_NAME: &str = "hf_held_v1";
/// Connection tracking maps that are counted: TCP and others, IPv4 and IPv6.
pub const HELD_MAPS: u32 = 4;
/// Entries of the array: one for each endpoint number and map, and [`HELD_UNTIL`].
pub const HELD_ENTRIES: u32 = 65_536 * HELD_MAPS + 1;
/// Index of the second (CLOCK_MONOTONIC) until which the counts are valid. After it, the counts
/// limit no endpoint, because without an agent they still include expired connections.
pub const HELD_UNTIL: u32 = 65_536 * HELD_MAPS;

/// Number of a connection tracking map.
#[inline(always)]
pub const fn held_map(tcp: bool, v6: bool) -> u32 {
    (!tcp) as u32 + (v6 as u32) * 2
}

/// Index of an endpoint's count. No pod is endpoint 0: its count is the number of free entries.
#[inline(always)]
pub const fn held_index(endpoint: u16, map: u32) -> u32 {
    endpoint as u32 * HELD_MAPS + map
}
