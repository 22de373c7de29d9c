//! The settings of the packet's endpoint, and of the node.

use aya_ebpf::{Global, programs::TcContext};
use shared_maps::{
    FAMILY_IPV4,
    endpoint::{
        DENY_RESPONSE_DNS, DENY_RESPONSE_ICMP, DUAL_STACK, EndpointConfig, HAS_IPV4, HAS_IPV6,
        LINK_LOCALS, LOW_INTERFACES, NO_LINK_HEADER, NODE_LINK_LOCALS, TRANSPARENT, link_local_of,
    },
    tunnel,
};

use crate::{
    address::Address,
    maps::{CONFIGS, HIGH_INTERFACES, INTERFACES, SCRATCH, Scratch},
    packet::ETH_LEN,
    words,
};

/// Flags of the node, such as `DUAL_STACK`, which the loader sets.
#[unsafe(no_mangle)]
static NODE_FLAGS: Global<u32> = Global::new(0);

/// No endpoint's settings: no address is its own.
const NONE: EndpointConfig = EndpointConfig {
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
    on_link_bits4: 0,
    pad: [0; 5],
    link_locals: [[0; 2]; LINK_LOCALS],
    node_link_locals: [[0; 2]; NODE_LINK_LOCALS],
};

/// Finds the endpoint of the packet's interface. Returns false if there is none.
///
/// The settings are copied, so that one packet has one version of them.
#[inline(always)]
pub(crate) fn enter(ctx: &TcContext, scratch: *mut Scratch) -> bool {
    // SAFETY: the context is valid for the run of the program.
    let slot = slot_of(unsafe { (*ctx.skb.skb).ifindex });
    if slot == 0 {
        return false;
    }
    let Some(config) = CONFIGS.get_ptr(slot) else {
        return false;
    };
    // SAFETY: the scratch is this CPU's own. The agent changes no settings of a slot that is in use.
    unsafe {
        (*scratch).slot = slot;
        words::copy(config, &raw mut (*scratch).endpoint);
    }
    true
}

/// Slot of the endpoint behind an interface, 0 for none.
#[inline(always)]
pub(crate) fn slot_of(interface: u32) -> u32 {
    let found = if interface < LOW_INTERFACES {
        INTERFACES.get(interface)
    } else {
        // SAFETY: the value is read at once.
        unsafe { HIGH_INTERFACES.get(interface) }
    };
    found.copied().unwrap_or(0)
}

/// Address of one family and identity of the endpoint in a slot.
#[inline(always)]
pub(crate) fn of_slot(slot: u32, family: u8) -> (Address, u32) {
    let Some(config) = CONFIGS.get_ptr(slot) else {
        return (Address::ZERO, 0);
    };
    // SAFETY: map values live as long as the program runs. The agent changes no settings of a slot
    // that is in use.
    unsafe {
        let address = if family == FAMILY_IPV4 {
            Address::v4((*config).ipv4)
        } else {
            Address::v6((*config).ipv6)
        };
        (address, (*config).identity)
    }
}

/// Prepares the scratch for a packet of an interface that is no pod's.
#[inline(always)]
pub(crate) fn enter_without_endpoint(scratch: *mut Scratch) {
    // SAFETY: the scratch is this CPU's own.
    unsafe {
        (*scratch).slot = 0;
        (*scratch).endpoint = NONE;
    }
}

/// Reads one field of the settings, so that the stack has no copy of all of them.
macro_rules! field {
    ($field:ident) => {{
        match SCRATCH.get_ptr(0) {
            // SAFETY: the value is this CPU's own.
            Some(scratch) => unsafe {
                core::ptr::addr_of!((*scratch).endpoint.$field).read_volatile()
            },
            None => NONE.$field,
        }
    }};
}

/// The endpoint's place in the maps that have one for each.
#[inline(always)]
pub(crate) fn slot() -> u32 {
    match SCRATCH.get_ptr(0) {
        // SAFETY: the value is this CPU's own.
        Some(scratch) => unsafe { core::ptr::addr_of!((*scratch).slot).read_volatile() },
        None => 0,
    }
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
    NODE_FLAGS.load() & DUAL_STACK as u32 != 0
}

/// Whether proxies send queries under pods' addresses.
#[inline(always)]
pub(crate) fn transparent() -> bool {
    NODE_FLAGS.load() & TRANSPARENT as u32 != 0
}

/// Whether any packet that egress policy denies gets a reply.
#[inline(always)]
pub(crate) fn replies_to_denied() -> bool {
    NODE_FLAGS.load() & u32::from(DENY_RESPONSE_ICMP | DENY_RESPONSE_DNS) != 0
}

/// Whether every packet that egress policy denies gets a reply.
#[inline(always)]
pub(crate) fn replies_to_all_denied() -> bool {
    NODE_FLAGS.load() & u32::from(DENY_RESPONSE_ICMP) != 0
}

/// Whether DNS queries that egress policy denies are refused by an answer.
#[inline(always)]
pub(crate) fn refuses_dns() -> bool {
    NODE_FLAGS.load() & u32::from(DENY_RESPONSE_DNS) != 0
}

/// Whether pods may not send to the tunnel's port.
#[inline(always)]
pub(crate) fn guards_tunnel() -> bool {
    NODE_FLAGS.load() & tunnel::GUARD != 0
}

/// Whether packets of the tunnel are unwrapped.
#[inline(always)]
pub(crate) fn unwraps() -> bool {
    NODE_FLAGS.load() & tunnel::UNWRAP != 0
}

/// Whether packets to pods of other nodes are wrapped.
#[inline(always)]
pub(crate) fn wraps() -> bool {
    NODE_FLAGS.load() & tunnel::WRAP != 0
}

/// Length of the link-layer header of the interface.
#[inline(always)]
pub(crate) fn link_header() -> u32 {
    if NODE_FLAGS.load() & NO_LINK_HEADER as u32 != 0 {
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

/// Whether `address` is the endpoint's own, or that of a group of machines: multicast, or a
/// broadcast of the link.
#[inline(always)]
pub(crate) fn is_own_or_group_v4(address: Address) -> bool {
    is_own_v4(address) || is_group_v4(address)
}

/// Whether `address` is a multicast group or a broadcast of the link.
#[inline(always)]
pub(crate) fn is_group_v4(address: Address) -> bool {
    if address.is_v4_group() {
        return true;
    }
    let bits = u32::from(field!(on_link_bits4));
    if bits == 0 || bits > 30 {
        return false;
    }
    let hosts = u32::MAX >> bits;
    u32::from_be(address.0[0]) == u32::from_be(ipv4().0[0]) | hosts
}

/// The same as [`is_own_or_group_v4`] for IPv6.
#[inline(always)]
pub(crate) fn is_own_or_group_v6(address: Address) -> bool {
    is_own_v6(address) || address.is_v6_multicast() || is_own_link_local(address)
}

/// Whether a frame may have the source `mac`, packed: it is the pod's, or the pod's is unknown and
/// `mac` is of one machine.
#[inline(always)]
pub(crate) fn may_be_own_mac(mac: u64) -> bool {
    let own = shared_maps::lxc::pack_mac(self::mac());
    mac == own || (own == 0 && mac & 1 == 0)
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
