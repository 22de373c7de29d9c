//! `cilium_policystats`: packets and bytes per policy entry.

use crate::Be16;

/// Name of the map and its pin.
pub const NAME: &str = "cilium_policystats";
/// Entries of the map by default, as in Cilium.
pub const MAX_ENTRIES: u32 = 65536;
/// Flags with which the map is created.
pub const FLAGS: u32 = crate::BPF_F_NO_COMMON_LRU;

/// Key: an endpoint, and the key of the policy entry that decided.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PolicyStatsKey {
    /// Number of the endpoint on this node.
    pub endpoint_id: u16,
    /// Padding, which is always zero, because it is part of the key.
    pub pad: u8,
    /// Significant bits, 0..=24, as in [`crate::policy::PolicyKey::lpm_len`].
    pub prefix_len: u8,
    /// Identity of the remote side; 0 is any.
    pub sec_label: u32,
    /// Direction of the packets, as in [`crate::policy::PolicyKey::egress`].
    pub egress: u8,
    /// Number of the IP protocol; 0 is any.
    pub protocol: u8,
    /// Destination port. Bits that are not significant are zero.
    pub dport: Be16,
}

/// Value, one for each CPU: a reader adds them up.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolicyStatsValue {
    /// Packets about which the entry decided.
    pub packets: u64,
    /// Sum of their lengths, link headers included.
    pub bytes: u64,
}
