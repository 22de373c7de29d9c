//! `cilium_ipcache_v2`: prefix → identity, longest match.

/// Name of the map and its pin.
pub const NAME: &str = "cilium_ipcache_v2";
/// Name of the older map: same key, and the same identity at offset 0 of a shorter value.
pub const NAME_V1: &str = "cilium_ipcache";
/// Entries of the map by default, as in Cilium.
pub const MAX_ENTRIES: u32 = 512_000;
/// Flags with which the map is created.
pub const FLAGS: u32 = crate::BPF_F_NO_PREALLOC | crate::BPF_F_RDONLY_PROG;
/// Bits of the key before the address: cluster id, padding, family.
pub const STATIC_PREFIX_BITS: u32 = 32;

/// Value flag: do not tunnel.
pub const FLAG_SKIP_TUNNEL: u8 = 1;
/// Value flag: a tunnel endpoint is set.
pub const FLAG_HAS_TUNNEL: u8 = 2;

/// Key: a prefix of the cluster or outside of it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IpcacheKey {
    /// Significant bits after this field: [`STATIC_PREFIX_BITS`] + prefix length.
    pub prefix_len: u32,
    /// Number of the cluster in Cilium's cluster mesh; 0 is this cluster.
    pub cluster_id: u16,
    /// Padding, which is always zero, because it is part of the key.
    pub pad1: u8,
    /// [`crate::FAMILY_IPV4`] or [`crate::FAMILY_IPV6`].
    pub family: u8,
    /// Masked address, network order; IPv4 in bytes 0..4.
    pub ip: [u8; 16],
}

impl IpcacheKey {
    /// Key of an IPv4 prefix; `len` in 0..=32.
    #[inline(always)]
    pub const fn v4(ip: [u8; 4], len: u8) -> Self {
        Self {
            prefix_len: STATIC_PREFIX_BITS + len as u32,
            cluster_id: 0,
            pad1: 0,
            family: crate::FAMILY_IPV4,
            ip: widen(ip),
        }
    }

    /// Key of an IPv6 prefix; `len` in 0..=128.
    #[inline(always)]
    pub const fn v6(ip: [u8; 16], len: u8) -> Self {
        Self {
            prefix_len: STATIC_PREFIX_BITS + len as u32,
            cluster_id: 0,
            pad1: 0,
            family: crate::FAMILY_IPV6,
            ip,
        }
    }
}

/// Value: the identity behind a prefix.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IpcacheValue {
    /// Identity of the addresses in the prefix.
    pub sec_identity: u32,
    /// Node to tunnel to, or zero.
    pub tunnel_endpoint: [u8; 16],
    /// Padding, which is always zero.
    pub pad: [u8; 2],
    /// Index of an IPsec key. Holdfast leaves it zero.
    pub key: u8,
    /// [`FLAG_SKIP_TUNNEL`] and [`FLAG_HAS_TUNNEL`]. Holdfast sets neither.
    pub flags: u8,
}

/// Value of the older map ([`NAME_V1`]).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IpcacheValueV1 {
    /// Identity of the addresses in the prefix.
    pub sec_identity: u32,
    /// IPv4 node to tunnel to, or zero.
    pub tunnel_endpoint: [u8; 4],
    /// Padding, which is always zero.
    pub pad: [u8; 2],
    /// Index of an IPsec key, as in [`IpcacheValue::key`].
    pub key: u8,
    /// The same flags as in [`IpcacheValue::flags`].
    pub flags: u8,
}

/// An IPv4 address in the form of a key's 16-byte field.
#[inline(always)]
pub const fn widen(ip: [u8; 4]) -> [u8; 16] {
    [
        ip[0], ip[1], ip[2], ip[3], 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    ]
}
