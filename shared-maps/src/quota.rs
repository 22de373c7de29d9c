//! Each endpoint's quota of what endpoints share in the datapath.
//!
//! - `hf_quota_v1` counts what an endpoint tried beyond a quota, by [`Limit`].
//! - `hf_held_v1` has how many answered connections each endpoint holds in each
//!   connection tracking map, and how many entries are free. The programs count
//!   between two looks of the agent, which counts again at each look.

/// Counters: pin and map name.
pub const NAME: &str = "hf_quota_v1";
/// Entries of the counters (LRU, per CPU).
pub const MAX_ENTRIES: u32 = 8192;

/// Symbol of the global that holds the nanoseconds between two packets of an
/// endpoint to the proxy (`u32`); 0: no quota.
pub const PACKET_INTERVAL: &str = "PACKET_INTERVAL";
/// How far an endpoint may be ahead of its rate, nanoseconds: a quarter of a second's packets
/// at once.
pub const BURST_NS: u64 = 250_000_000;

/// Datagrams that a new TCP connection to the proxy counts for: about what it costs the node.
pub const CONNECTION_COST: u32 = 8;

/// What has a quota.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Limit {
    /// Packets to the DNS proxy per second, a SYN as [`CONNECTION_COST`]. Those beyond are
    /// dropped.
    ToProxy = 0,
    /// Connections not answered yet. One more displaces the oldest of them.
    Unanswered = 1,
    /// Datagrams whose fragments are on their way. One more displaces the oldest.
    Fragments = 2,
    /// Servers and ports noted for redirection. One more displaces the oldest.
    Servers = 3,
    /// Answered connections. One more counts as not answered.
    Connections = 4,
}

impl Limit {
    /// Every limit.
    pub const ALL: [Self; 5] = [
        Self::ToProxy,
        Self::Unanswered,
        Self::Fragments,
        Self::Servers,
        Self::Connections,
    ];

    /// Word for people and machines.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ToProxy => "packets_to_proxy",
            Self::Unanswered => "unanswered_connections",
            Self::Fragments => "fragmented_datagrams",
            Self::Servers => "dns_servers",
            Self::Connections => "connections",
        }
    }
}

/// Key of the counters. The value is [`crate::event::Counter`], per CPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct QuotaKey {
    /// Endpoint id.
    pub endpoint: u16,
    /// A [`Limit`] number.
    pub limit: u8,
    /// Zero.
    pub pad: u8,
}

/// Connections held: pin and map name (array of `u32`).
pub const HELD_NAME: &str = "hf_held_v1";
/// Connection tracking maps that are counted: TCP and others, IPv4 and IPv6.
pub const HELD_MAPS: u32 = 4;
/// Entries of the array.
pub const HELD_ENTRIES: u32 = 65_536 * HELD_MAPS + 1;
/// Index of the second (CLOCK_MONOTONIC) until which the counts are good. Later no endpoint
/// is limited by them: without an agent nobody counts what expired.
pub const HELD_UNTIL: u32 = 65_536 * HELD_MAPS;

/// Number of a connection tracking map.
#[inline(always)]
pub const fn held_map(tcp: bool, v6: bool) -> u32 {
    (!tcp) as u32 + (v6 as u32) * 2
}

/// Index of an endpoint's count. Endpoint 0, which no pod has, stands for the free entries.
#[inline(always)]
pub const fn held_index(endpoint: u16, map: u32) -> u32 {
    endpoint as u32 * HELD_MAPS + map
}
