//! Connection tracking maps, in Cilium's layout.
//!
//! In a key, the addresses are those of the first packet, swapped. The ports are not swapped. A
//! connection from pod A:p to server B:q has `daddr` = A, `saddr` = B, `dport` = q, `sport` = p and
//! flags [`DIR_OUT`].

use crate::Be16;

/// Name and pin of the map for TCP over IPv4.
pub const NAME_TCP4: &str = "cilium_ct4_global";
/// Name and pin of the map for all other protocols over IPv4.
pub const NAME_ANY4: &str = "cilium_ct_any4_global";
/// Name and pin of the map for TCP over IPv6.
pub const NAME_TCP6: &str = "cilium_ct6_global";
/// Name and pin of the map for all other protocols over IPv6.
pub const NAME_ANY6: &str = "cilium_ct_any6_global";
/// Entries of each TCP map in Cilium, and in the programs as they are compiled. The agent makes maps
/// of a size of its own.
pub const MAX_ENTRIES_TCP: u32 = 524_288;
/// The same of each map for other protocols.
pub const MAX_ENTRIES_ANY: u32 = 262_144;

/// Key flag: the connection leaves the endpoint.
pub const DIR_OUT: u8 = 0;
/// Key flag: the connection enters the endpoint.
pub const DIR_IN: u8 = 1;
/// Key flag: an ICMP error that belongs to a connection.
pub const RELATED: u8 = 2;
/// Key flag: an entry of Cilium's load balancing. Holdfast makes none.
pub const SERVICE: u8 = 4;

/// Value flag: the remote side sent FIN or RST.
pub const FLAG_RX_CLOSING: u16 = 1 << 0;
/// Value flag: the local side sent FIN or RST.
pub const FLAG_TX_CLOSING: u16 = 1 << 1;
/// Value flag: a segment other than the SYN was seen.
pub const FLAG_SEEN_NON_SYN: u16 = 1 << 4;
/// Value flag of a [`DIR_IN`] entry: a proxy of this node opened the flow (Cilium's `from_l7lb`).
pub const FLAG_FROM_PROXY: u16 = 1 << 8;
/// Value flag of a [`DIR_IN`] entry: the opening packet was wrapped, and named the identity of its
/// sender (Cilium's `from_tunnel`).
pub const FLAG_FROM_TUNNEL: u16 = 1 << 10;
/// Value flag of Holdfast, in a bit that Cilium reserves: the other side answered. For TCP: both
/// sides sent a segment other than a SYN.
pub const FLAG_ANSWERED: u16 = 1 << 15;

/// `last_tx_report` of a connection that policy refused.
pub const REFUSED: u32 = 0;

/// Lifetime of an established TCP entry, seconds.
pub const LIFETIME_TCP: u32 = 8000;
/// Lifetime of a TCP entry before its handshake is done, seconds.
pub const LIFETIME_SYN: u32 = 60;
/// Lifetime of a TCP entry after both sides closed, seconds.
pub const LIFETIME_CLOSE: u32 = 10;
/// Lifetime of other entries, seconds.
pub const LIFETIME_ANY: u32 = 60;

/// Key, IPv4: 14 bytes.
pub type CtKey4 = CtKey<[u8; 4]>;
/// Key, IPv6: 38 bytes.
pub type CtKey6 = CtKey<[u8; 16]>;

/// Key, with addresses of the family's length. Packed.
#[repr(C, packed)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CtKey<A> {
    /// Source of the original packet (see the module's text).
    pub daddr: A,
    /// Destination of the original packet.
    pub saddr: A,
    /// Destination port of the original packet.
    pub dport: Be16,
    /// Source port of the original packet.
    pub sport: Be16,
    /// Number of the IP protocol, such as 6 for TCP.
    pub nexthdr: u8,
    /// One of [`DIR_OUT`], [`DIR_IN`], [`RELATED`] and [`SERVICE`].
    pub flags: u8,
}

/// Value of the maps of both families.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CtValue {
    /// NAT address, or service backend. Holdfast leaves it zero.
    pub nat_addr: [u64; 2],
    /// Number of packets in both directions.
    pub packets: u64,
    /// Sum of their lengths, link headers included.
    pub bytes: u64,
    /// Absolute expiry, seconds of CLOCK_MONOTONIC (`bpf_ktime_get_ns`).
    pub lifetime: u32,
    /// Combination of the value flags, such as [`FLAG_RX_CLOSING`].
    pub flags: u16,
    /// Reverse NAT index. Holdfast leaves it zero.
    pub rev_nat_index: u16,
    /// NAT port. Holdfast leaves it zero.
    pub nat_port: Be16,
    /// TCP flags seen from the local side since the last report.
    pub tx_flags_seen: u8,
    /// TCP flags seen from the remote side since the last report.
    pub rx_flags_seen: u8,
    /// Identity of the side that opened the connection.
    pub src_sec_id: u32,
    /// When policy last allowed the direction that opened the connection, in the clock of
    /// `lifetime`. [`REFUSED`]: policy refused it at the last look. (Cilium: time of the last report
    /// of the local side.)
    pub last_tx_report: u32,
    /// Number of the endpoint that the entry belongs to. (Cilium: time of the last report of the
    /// remote side.)
    pub last_rx_report: u32,
}
