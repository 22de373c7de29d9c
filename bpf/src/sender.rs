//! The sender of a packet that this node forwards to a pod.
//!
//! The source address alone does not name it. Rules of this node write the node's own address into
//! packets of others (kube-proxy's masquerade), and anyone outside can write any address. The
//! interface at which the packet arrived says more:
//!
//! - A packet from an endpoint's interface is that endpoint's: `from_pod` checked its source
//!   before anything translated it.
//! - The source of any other packet is one that the node translated, if it is the node's own. The
//!   kernel's connection tracking has the source before that ([`conntrack`]).
//! - A packet of another node's pod may have come with its identity ([`crate::tunnel`]).
//! - An address of a local pod counts only at the interface through which the node reaches it.
//! - What remains is a sender outside: the *world*.
//!
//! [`conntrack`]: crate::netfilter

use aya_ebpf::{
    bindings::bpf_fib_lookup as FibLookup, helpers::bpf_fib_lookup, programs::TcContext,
};
use shared_maps::{
    FAMILY_IPV4, IdentityId,
    lxc::{FLAG_HOST, LxcKey},
};

use crate::{
    address::Address,
    config,
    maps::{self, LXC},
    netfilter,
    packet::Packet,
    tunnel,
};

/// `BPF_FIB_LKUP_RET_SUCCESS`, and `BPF_FIB_LKUP_RET_NO_NEIGH`: the route is found.
const ROUTED: [i64; 2] = [0, 7];

/// Sender of a packet that this node forwards to a pod.
#[derive(Clone, Copy)]
pub(crate) struct Sender {
    pub(crate) identity: u32,
    /// The endpoint that receives it: no policy parts a pod from itself.
    pub(crate) is_receiver: bool,
    /// Whether the packet came by the tunnel, which names the sender.
    pub(crate) by_tunnel: bool,
}

/// The sender of a packet that arrived at interface `arrival`.
#[inline(always)]
pub(crate) fn of_forwarded(ctx: &TcContext, packet: &Packet, arrival: u32) -> Sender {
    let slot = config::slot_of(arrival);
    if slot != 0 {
        return Sender {
            identity: of_endpoint(slot, packet.family),
            is_receiver: slot == config::slot(),
            by_tunnel: false,
        };
    }
    if let Some((identity, by_tunnel)) = of_address(ctx, packet.saddr, packet.family, arrival) {
        return Sender {
            identity,
            is_receiver: false,
            by_tunnel,
        };
    }
    if let Some(before) = netfilter::source(ctx, packet.family)
        && let Some((identity, by_tunnel)) = of_address(ctx, before, packet.family, arrival)
    {
        return Sender {
            identity,
            is_receiver: config::is_own_v4(before) || config::is_own_v6(before),
            by_tunnel,
        };
    }
    Sender {
        identity: IdentityId::world_of(packet.family, config::dual_stack()).0,
        is_receiver: false,
        by_tunnel: false,
    }
}

/// Identity of the endpoint in a slot. The ipcache has it before the endpoint's settings do.
#[inline(always)]
fn of_endpoint(slot: u32, family: u8) -> u32 {
    let (address, identity) = config::of_slot(slot, family);
    // Without an address of the family, the packet has a link-local one.
    if address.is_zero() {
        return identity;
    }
    maps::identity_of(address.bytes(), family).unwrap_or(identity)
}

/// Identity of an address from which a packet came in at `arrival`, and whether it came by the tunnel.
/// `None` if the address belongs to this node or to a pod of it, and the interface does not.
#[inline(never)]
fn of_address(ctx: &TcContext, address: Address, family: u8, arrival: u32) -> Option<(u32, bool)> {
    let key = LxcKey {
        ip: address.bytes(),
        family,
        key: 0,
        cluster_id: 0,
    };
    // SAFETY: the map is not preallocated, values stay until the grace period.
    if let Some(value) = unsafe { LXC.get(key) } {
        if value.flags & FLAG_HOST != 0 || !is_reached_through(ctx, address, family, arrival) {
            return None;
        }
        return Some((maps::identity_or_world(address, family), false));
    }
    if let Some(identity) = tunnel::identity_of_source(address, family) {
        return Some((identity, true));
    }
    let identity = maps::identity_or_world(address, family);
    tunnel::count_plain(ctx, identity);
    Some((identity, false))
}

/// Whether the node reaches `address` through this interface: for a pod at a bridge, that is the
/// bridge or a VLAN of it.
#[inline(never)]
fn is_reached_through(ctx: &TcContext, address: Address, family: u8, interface: u32) -> bool {
    const WORDS: usize = size_of::<FibLookup>() / 4;
    /// `AF_INET` and `AF_INET6`, in the first byte.
    const FAMILIES: [u32; 2] = [2u32.to_le(), 10u32.to_le()];
    // `struct bpf_fib_lookup`, whose fields from the source on are words.
    let mut lookup = [0_u32; WORDS];
    lookup[0] = FAMILIES[usize::from(family != FAMILY_IPV4)];
    lookup[2] = interface;
    [lookup[8], lookup[9], lookup[10], lookup[11]] = address.0;
    // SAFETY: the structure is as long as it is said to be.
    let result = unsafe {
        bpf_fib_lookup(
            ctx.skb.skb.cast(),
            (&raw mut lookup).cast(),
            size_of::<FibLookup>() as i32,
            0,
        )
    };
    ROUTED.contains(&result) && lookup[2] == interface
}
