//! The endpoint's constants, set by the loader.

use aya_ebpf::Global;
use shared_maps::endpoint::{
    DUAL_STACK, EndpointConfig, HAS_IPV4, HAS_IPV6, LINK_LOCALS, NO_LINK_HEADER, NODE_LINK_LOCALS,
    TRANSPARENT, link_local_of,
};

use crate::{address::Address, packet::ETH_LEN};

#[unsafe(no_mangle)]
static ENDPOINT: Global<EndpointConfig> = Global::new(EndpointConfig {
    identity: 0,
    ifindex: 0,
    ipv6: [0; 16],
    ipv4: [0; 4],
    id: 0,
    mac: [0; 6],
    gateway_mac: [0; 6],
    flags: 0,
    on_link_bits: 0,
    bridge_mac: [0; 6],
    pad: [0; 6],
    link_locals: [[0; 2]; LINK_LOCALS],
    node_link_locals: [[0; 2]; NODE_LINK_LOCALS],
});

/// Reads one field of the global, so that the stack has no copy of all of it.
macro_rules! field {
    ($field:ident) => {{
        let config = core::ptr::from_ref(&ENDPOINT).cast::<EndpointConfig>();
        // SAFETY: `Global` is a transparent wrapper; volatile because the
        // loader replaces what the compiler sees as a constant.
        unsafe { core::ptr::addr_of!((*config).$field).read_volatile() }
    }};
}

#[inline(always)]
pub(crate) fn id() -> u16 {
    field!(id)
}

#[inline(always)]
pub(crate) fn identity() -> u32 {
    field!(identity)
}

#[inline(always)]
pub(crate) fn ifindex() -> u32 {
    field!(ifindex)
}

#[inline(always)]
pub(crate) fn dual_stack() -> bool {
    field!(flags) & DUAL_STACK != 0
}

/// Whether proxies send queries under pods' addresses.
#[inline(always)]
pub(crate) fn transparent() -> bool {
    field!(flags) & TRANSPARENT != 0
}

/// Length of the link-layer header of the interface.
#[inline(always)]
pub(crate) fn link_header() -> u32 {
    if field!(flags) & NO_LINK_HEADER != 0 {
        0
    } else {
        ETH_LEN
    }
}

#[inline(always)]
pub(crate) fn mac() -> [u8; 6] {
    field!(mac)
}

/// MAC to which a bridge delivers frames for this node.
#[inline(always)]
pub(crate) fn gateway_mac() -> [u8; 6] {
    field!(gateway_mac)
}

/// Whether the host-side interface is a port of a bridge.
#[inline(always)]
pub(crate) fn is_bridge_port() -> bool {
    let m = gateway_mac();
    m[0] | m[1] | m[2] | m[3] | m[4] | m[5] != 0
}

/// The endpoint's IPv4 address; zero if it has none.
#[inline(always)]
pub(crate) fn ipv4() -> Address {
    Address::v4(field!(ipv4))
}

/// The endpoint's IPv6 address; zero if it has none.
#[inline(always)]
pub(crate) fn ipv6() -> Address {
    Address::v6(field!(ipv6))
}

/// Whether `address` is the endpoint's IPv4 address.
#[inline(always)]
pub(crate) fn is_own_v4(address: Address) -> bool {
    field!(flags) & HAS_IPV4 != 0 && address.is(Address::v4(field!(ipv4)))
}

/// Whether `address` is the endpoint's IPv6 address.
#[inline(always)]
pub(crate) fn is_own_v6(address: Address) -> bool {
    field!(flags) & HAS_IPV6 != 0 && address.is(Address::v6(field!(ipv6)))
}

/// Whether `address` is a link-local address of the endpoint: the one made from its MAC, or another
/// one of its interface.
#[inline(always)]
pub(crate) fn is_own_link_local(address: Address) -> bool {
    if !address.is_v6_link_local() {
        return false;
    }
    let mac = mac();
    let known = mac[0] | mac[1] | mac[2] | mac[3] | mac[4] | mac[5] != 0;
    (known && address.is(Address::v6(link_local_of(mac))))
        || is_among(address, &field!(link_locals))
}

/// Whether `address` is a link-local address of the node on the pod's link.
#[inline(always)]
pub(crate) fn is_link_local_of_node(address: Address) -> bool {
    is_among(address, &field!(node_link_locals))
}

/// Whether `address` is in fe80::/64 and has one of these interface identifiers.
#[inline(always)]
fn is_among<const N: usize>(address: Address, ids: &[[u32; 2]; N]) -> bool {
    let [a, b, c, d] = address.0;
    let mut found = false;
    for id in ids {
        found |= id[0] == c && id[1] == d;
    }
    found && c | d != 0 && a == 0xfe80_0000u32.to_be() && b == 0
}

/// MAC of the bridge of which the interface is a port; zero if it is no bridge port.
#[inline(always)]
pub(crate) fn bridge_mac() -> [u8; 6] {
    field!(bridge_mac)
}

/// Whether `address` has the bridge's prefix that contains the endpoint's own address.
#[inline(always)]
pub(crate) fn is_on_bridge_prefix(address: Address) -> bool {
    let bits = u32::from(field!(on_link_bits));
    if bits == 0 {
        return false;
    }
    let (own, other) = (ipv6().0, address.0);
    let mut same = true;
    for word in 0..4u32 {
        let of_word = bits.saturating_sub(word * 32);
        let mask = if of_word >= 32 {
            u32::MAX
        } else {
            !(u32::MAX >> (of_word & 31))
        };
        let (a, b) = (own[word as usize], other[word as usize]);
        same &= u32::from_be(a ^ b) & mask == 0;
    }
    same
}
