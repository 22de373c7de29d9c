//! What the programs of one endpoint are told when they are loaded.
//!
//! One copy of the programs is loaded per endpoint; this record is its
//! read-only global [`GLOBAL`].

/// Symbol of the global in the program object.
pub const GLOBAL: &str = "ENDPOINT";

/// Flag: the endpoint has an IPv4 address.
pub const HAS_IPV4: u8 = 1;
/// Flag: the endpoint has an IPv6 address.
pub const HAS_IPV6: u8 = 2;
/// Flag: the node has both families, so that what the ipcache does not know
/// is world-ipv4 or world-ipv6 rather than world.
pub const DUAL_STACK: u8 = 4;
/// Flag: proxies send queries under pods' addresses.
pub const TRANSPARENT: u8 = 8;
/// Flag, of `to_proxy`: packets of the interface begin with their IP header.
pub const NO_LINK_HEADER: u8 = 16;

/// The endpoint a program serves.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EndpointConfig {
    /// Identity.
    pub identity: u32,
    /// Host-side interface.
    pub ifindex: u32,
    /// IPv6 address, zero without [`HAS_IPV6`].
    pub ipv6: [u8; 16],
    /// IPv4 address, zero without [`HAS_IPV4`].
    pub ipv4: [u8; 4],
    /// Endpoint id.
    pub id: u16,
    /// MAC of the pod's interface; all zero: not known, not checked.
    pub mac: [u8; 6],
    /// MAC under which a bridge delivers the pod's frames to this node, where the host-side
    /// interface is a port of one. All zero: it is no bridge port, and what it receives is routed.
    pub gateway_mac: [u8; 6],
    /// [`HAS_IPV4`], [`HAS_IPV6`], [`DUAL_STACK`], [`TRANSPARENT`], [`NO_LINK_HEADER`].
    pub flags: u8,
    /// Zero.
    pub pad: u8,
}
