//! The endpoint's constants, set by the loader.

use aya_ebpf::Global;
use shared_maps::endpoint::{
    DUAL_STACK, EndpointConfig, HAS_IPV4, HAS_IPV6, NO_LINK_HEADER, TRANSPARENT,
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
    pad: 0,
});

/// Reads one field of the global, so that no copy of the whole lies on the stack.
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

/// MAC under which a bridge delivers frames to this node.
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

/// Whether `address` is the link-local address made of the endpoint's MAC
/// (RFC 4291, appendix A). Any link-local address if the MAC is not known.
#[inline(always)]
pub(crate) fn is_own_link_local(address: Address) -> bool {
    if !address.is_v6_link_local() {
        return false;
    }
    let m = mac();
    if m[0] | m[1] | m[2] | m[3] | m[4] | m[5] == 0 {
        return true;
    }
    let a = address.0;
    a[0] == 0xfe80_0000u32.to_be()
        && a[1] == 0
        && a[2] == u32::from_ne_bytes([m[0] ^ 2, m[1], m[2], 0xff])
        && a[3] == u32::from_ne_bytes([0xfe, m[3], m[4], m[5]])
}
