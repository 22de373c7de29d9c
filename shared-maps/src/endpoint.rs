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
    /// Length of the IPv6 prefix of a bridge that the endpoint's address is in; 0: none.
    pub on_link_bits: u8,
    /// MAC of that bridge itself; all zero: none.
    pub bridge_mac: [u8; 6],
    /// Zero.
    pub pad: [u8; 6],
    /// Interface identifiers of the pod's link-local addresses, as they lie in an address,
    /// besides the one that is made of [`Self::mac`]. All zero: no address.
    pub link_locals: [[u32; 2]; LINK_LOCALS],
    /// Those of the node's addresses on the same link.
    pub node_link_locals: [[u32; 2]; NODE_LINK_LOCALS],
}

/// Link-local addresses of a pod's interface that count, besides the one made of its MAC.
pub const LINK_LOCALS: usize = 2;
/// Link-local addresses of the node on a pod's link that count.
pub const NODE_LINK_LOCALS: usize = 4;

/// The interface identifier of an address of fe80::/64; none of another address.
pub fn interface_id(address: [u8; 16]) -> Option<[u32; 2]> {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = address;
    ([a, b, c, d, e, f, g, h] == [0xfe, 0x80, 0, 0, 0, 0, 0, 0]).then_some([
        u32::from_ne_bytes([i, j, k, l]),
        u32::from_ne_bytes([m, n, o, p]),
    ])
}

/// The link-local address made of a MAC (RFC 4291, appendix A).
pub const fn link_local_of(mac: [u8; 6]) -> [u8; 16] {
    let [a, b, c, d, e, f] = mac;
    [
        0xfe,
        0x80,
        0,
        0,
        0,
        0,
        0,
        0,
        a ^ 2,
        b,
        c,
        0xff,
        0xfe,
        d,
        e,
        f,
    ]
}
