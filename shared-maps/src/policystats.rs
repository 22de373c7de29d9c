//! `cilium_policystats`: packets and bytes per policy entry.

use crate::Be16;

/// Pin and map name.
pub const NAME: &str = "cilium_policystats";
/// Default number of entries.
pub const MAX_ENTRIES: u32 = 65536;
/// Creation flags.
pub const FLAGS: u32 = crate::BPF_F_NO_COMMON_LRU;

/// Key.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PolicyStatsKey {
    /// Endpoint id.
    pub endpoint_id: u16,
    /// Zero.
    pub pad: u8,
    /// 0..=24, as in [`crate::policy::PolicyKey::lpm_len`].
    pub prefix_len: u8,
    /// Remote identity.
    pub sec_label: u32,
    /// Direction.
    pub egress: u8,
    /// IP protocol.
    pub protocol: u8,
    /// Destination port.
    pub dport: Be16,
}

/// Value, one per CPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolicyStatsValue {
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
}
