//! Constants of one endpoint, given to its programs when they are loaded.
//!
//! One copy of the programs is loaded per endpoint. This record is its read-only global [`GLOBAL`].

/// Symbol of the global in the program object.
pub const GLOBAL: &str = "ENDPOINT";

/// Flag: the endpoint has an IPv4 address.
pub const HAS_IPV4: u8 = 1;
/// Flag: the endpoint has an IPv6 address.
pub const HAS_IPV6: u8 = 2;
/// Flag: the node has both families. An address without an ipcache entry is then world-ipv4 or
/// world-ipv6 instead of world.
pub const DUAL_STACK: u8 = 4;
/// Flag: proxies send queries from pods' addresses.
pub const TRANSPARENT: u8 = 8;
/// Flag for `to_proxy`: packets of the interface begin with their IP header.
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
    /// MAC of the pod's interface. All zero: unknown, and not checked.
    pub mac: [u8; 6],
    /// MAC to which a bridge delivers the pod's frames for this node, if the host-side interface is
    /// a bridge port. All zero: it is no bridge port, and the node routes the packets that it
    /// receives.
    pub gateway_mac: [u8; 6],
    /// [`HAS_IPV4`], [`HAS_IPV6`], [`DUAL_STACK`], [`TRANSPARENT`], [`NO_LINK_HEADER`].
    pub flags: u8,
    /// Length of the bridge's IPv6 prefix that contains the endpoint's address; 0: none.
    pub on_link_bits: u8,
    /// MAC of the bridge itself; all zero: none.
    pub bridge_mac: [u8; 6],
    /// Zero.
    pub pad: [u8; 6],
    /// Interface identifiers of the pod's link-local addresses, except the one made from
    /// [`Self::mac`], as they are in an address. All zero: no address.
    pub link_locals: [[u32; 2]; LINK_LOCALS],
    /// Interface identifiers of the node's addresses on the same link.
    pub node_link_locals: [[u32; 2]; NODE_LINK_LOCALS],
}

/// Link-local addresses of a pod's interface that are accepted, besides the one made from its MAC.
pub const LINK_LOCALS: usize = 2;
/// Link-local addresses of the node on a pod's link that are accepted.
pub const NODE_LINK_LOCALS: usize = 4;

/// The interface identifier of an address in fe80::/64; `None` for other addresses.
pub fn interface_id(address: [u8; 16]) -> Option<[u32; 2]> {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = address;
    ([a, b, c, d, e, f, g, h] == [0xfe, 0x80, 0, 0, 0, 0, 0, 0]).then_some([
        u32::from_ne_bytes([i, j, k, l]),
        u32::from_ne_bytes([m, n, o, p]),
    ])
}

/// The link-local address made from a MAC (RFC 4291, appendix A).
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
