//! `cilium_world_cidrs4`: blocks of addresses outside of the cluster. Packets to them are not wrapped.

/// Name of the map and its pin.
pub const NAME: &str = "cilium_world_cidrs4";
/// Most blocks.
pub const MAX_ENTRIES: u32 = 16_384;
/// Flags with which the map is created.
pub const FLAGS: u32 = crate::BPF_F_NO_PREALLOC;
/// Value of every entry.
pub const PRESENT: u8 = 1;

/// Key: a block of IPv4 addresses.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorldKey {
    /// Significant bits of the address.
    pub prefix_len: u32,
    /// Masked address, network order.
    pub ip: [u8; 4],
}

impl WorldKey {
    /// Key of a block; the bits of `ip` behind `len` do not count. `None` if `len` is above 32.
    pub const fn new(ip: [u8; 4], len: u8) -> Option<Self> {
        if len > 32 {
            return None;
        }
        let mask = match len {
            0 => 0,
            len => u32::MAX << (32 - len as u32),
        };
        Some(Self {
            prefix_len: len as u32,
            ip: (u32::from_be_bytes(ip) & mask).to_be_bytes(),
        })
    }
}
