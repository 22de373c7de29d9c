//! `cilium_lxc`: address of a local endpoint → the endpoint.

/// Name of the map and its pin.
pub const NAME: &str = "cilium_lxc";
/// Most entries the map holds.
pub const MAX_ENTRIES: u32 = 65535;
/// Flags with which the map is created.
pub const FLAGS: u32 = crate::BPF_F_NO_PREALLOC | crate::BPF_F_RDONLY_PROG;

/// Value flag: the address is one of the node's own. `lxc_id` and `sec_id` are not set.
pub const FLAG_HOST: u32 = 1;

/// Key: one address of an endpoint or of the node.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LxcKey {
    /// IPv4 in bytes 0..4 (rest zero) or IPv6, network order.
    pub ip: [u8; 16],
    /// [`crate::FAMILY_IPV4`] or [`crate::FAMILY_IPV6`].
    pub family: u8,
    /// Field of Cilium's layout that is always 0 here.
    pub key: u8,
    /// Always 0 for local endpoints.
    pub cluster_id: u16,
}

impl LxcKey {
    /// Key of an IPv4 address.
    #[inline(always)]
    pub const fn v4(ip: [u8; 4]) -> Self {
        Self {
            ip: crate::ipcache::widen(ip),
            family: crate::FAMILY_IPV4,
            key: 0,
            cluster_id: 0,
        }
    }

    /// Key of an IPv6 address.
    #[inline(always)]
    pub const fn v6(ip: [u8; 16]) -> Self {
        Self {
            ip,
            family: crate::FAMILY_IPV6,
            key: 0,
            cluster_id: 0,
        }
    }
}

/// Value: the endpoint behind an address.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LxcValue {
    /// Number of the host-side interface; 0 for an address of the node.
    pub ifindex: u32,
    /// Formerly a 16-bit identity; 0.
    pub unused: u16,
    /// Number of the endpoint; 0 for an address of the node.
    pub lxc_id: u16,
    /// [`FLAG_HOST`] for an address of the node, otherwise 0. In Cilium also 2, for an endpoint in the host's network
    /// namespace, which Holdfast neither writes nor reads.
    pub flags: u32,
    /// Routing domain in Cilium's layout. Holdfast leaves it zero.
    pub rt_info: u32,
    /// Endpoint's MAC, first byte in the least significant byte.
    pub mac: u64,
    /// Host side's MAC, same packing.
    pub node_mac: u64,
    /// Identity of the endpoint; 0 for an address of the node.
    pub sec_id: u32,
    /// Parent interface in Cilium's layout. Holdfast leaves it zero.
    pub parent_ifindex: u32,
    /// Padding, which is always zero.
    pub pad: [u32; 2],
}

/// Packs a MAC address as [`LxcValue::mac`] has it.
pub const fn pack_mac(mac: [u8; 6]) -> u64 {
    u64::from_le_bytes([mac[0], mac[1], mac[2], mac[3], mac[4], mac[5], 0, 0])
}
