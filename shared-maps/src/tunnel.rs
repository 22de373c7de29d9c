//! Packets between nodes that carry the identity of their sender in a VXLAN header (RFC 7348).
//!
//! Outer and inner addresses are the pods' own, so that the header says nothing but the identity:
//! which is the number in the field for the network (VNI).

use crate::IdentityId;

/// Name of the map of one [`TunnelConfig`], and its pin.
pub const NAME: &str = "hf_tunnel_v1";
/// Flag of the node ([`crate::endpoint::NODE_FLAGS`]): pods may not send to the tunnel's port
/// themselves.
pub const GUARD: u32 = 128;
/// Flag of the node: packets of the tunnel are unwrapped, and the sources that they name count.
pub const UNWRAP: u32 = 256;
/// Flag of the node: packets to pods of other nodes are wrapped.
pub const WRAP: u32 = 512;

/// UDP port of the tunnel where nothing else is set, as in Cilium.
pub const DEFAULT_PORT: u16 = 8472;
/// Length of the tunnel's header, which follows the outer UDP header.
pub const HEADER_LEN: u32 = 8;
/// Bytes that wrapping adds: an IPv4 header without options, UDP, the tunnel's header, and Ethernet.
pub const OVERHEAD: u32 = 20 + 8 + HEADER_LEN + 14;
/// In the header's first byte: the VNI counts.
const HAS_VNI: u8 = 0x08;

/// Highest identity that means the same label set on every node. Those above are a node's own.
pub const LAST_SHARED: IdentityId = IdentityId(61_439);

/// Settings of the tunnel, for the programs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TunnelConfig {
    /// Number of the device that wraps packets; 0: there is none, and nothing is wrapped.
    pub device: u32,
    /// Longest IP packet, in bytes, that the native devices carry.
    pub mtu: u32,
    /// UDP port of the tunnel, host order.
    pub port: u16,
    /// [`BLOCKS_KNOWN`], or 0.
    pub flags: u16,
}

/// In [`TunnelConfig::flags`]: blocks of pods are known, so that an address outside of all blocks is
/// no pod's.
pub const BLOCKS_KNOWN: u16 = 1;

impl TunnelConfig {
    /// Longest IP packet that can be wrapped.
    #[inline(always)]
    pub const fn inner_mtu(self) -> u32 {
        self.mtu.saturating_sub(OVERHEAD)
    }
}

/// The VNI of an identity. `None`: the identity is of this node only and does not fit. The node is
/// another node to its peers.
#[inline(always)]
pub const fn vni(identity: IdentityId) -> Option<u32> {
    if identity.0 == IdentityId::HOST.0 {
        return Some(IdentityId::REMOTE_NODE.0);
    }
    if identity.0 < 1 << 24 {
        Some(identity.0)
    } else {
        None
    }
}

/// The VNI that packets of an endpoint with this identity get. One whose number means nothing on
/// other nodes is sent as one whose labels are not known yet.
#[inline(always)]
pub const fn vni_of_endpoint(identity: IdentityId) -> u32 {
    if identity.is_endpoint() && identity.0 <= LAST_SHARED.0 {
        identity.0
    } else {
        IdentityId::INIT.0
    }
}

/// The tunnel's header for a VNI.
#[inline(always)]
pub const fn header(vni: u32) -> [u8; 8] {
    let [_, a, b, c] = vni.to_be_bytes();
    [HAS_VNI, 0, 0, 0, a, b, c, 0]
}

/// The identity that a header names. `None`: it names none, or one that no node may send. The
/// numbers of a node's own, of the node itself, and of the world are such.
#[inline(always)]
pub const fn identity_of(header: [u8; 8]) -> Option<IdentityId> {
    let identity = IdentityId(vni_in(header));
    let is_shared = identity.is_endpoint() && identity.0 <= LAST_SHARED.0;
    let is_sent =
        is_shared || identity.0 == IdentityId::INIT.0 || identity.0 == IdentityId::REMOTE_NODE.0;
    if has_vni(header[0]) && is_sent {
        Some(identity)
    } else {
        None
    }
}

/// Whether a header with this first byte has a VNI.
#[inline(always)]
pub const fn has_vni(first: u8) -> bool {
    first & HAS_VNI != 0
}

/// The VNI in a header, whether it counts or not.
#[inline(always)]
pub const fn vni_in(header: [u8; 8]) -> u32 {
    u32::from_be_bytes([0, header[4], header[5], header[6]])
}

/// Whether an address with this identity is a node's or the API server's, and no pod's: packets to
/// it are never wrapped.
#[inline(always)]
pub const fn is_never_wrapped(identity: IdentityId) -> bool {
    matches!(
        identity,
        IdentityId::HOST | IdentityId::REMOTE_NODE | IdentityId::KUBE_APISERVER
    ) || identity.0 & crate::identity::SCOPE_MASK == crate::identity::SCOPE_REMOTE_NODE
}
