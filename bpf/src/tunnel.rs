//! Packets between nodes that carry the identity of their sender.
//!
//! ```text
//!  pod ─► from_pod ─► stack, routes ─► to_net ─► hf_vxlan ─► routes ─► to_net ─► wire
//!                                      wraps                           passes it
//!  pod ◄─ to_pod ◄─── stack, routes ◄─ from_net ◄─────────────────────────────── wire
//!         reads the source             unwraps, notes source → identity
//! ```
//!
//! Outer and inner addresses are the same. So routers see the pods' addresses in both directions, and
//! the source of a packet names the identity that came with it.

use aya_ebpf::{
    bindings::{
        BPF_F_ADJ_ROOM_FIXED_GSO, BPF_F_DONT_FRAGMENT, BPF_F_ZERO_CSUM_TX,
        bpf_adj_room_mode::BPF_ADJ_ROOM_MAC, bpf_tunnel_key,
    },
    helpers::{bpf_ktime_get_ns, bpf_redirect, bpf_skb_get_tunnel_key, bpf_skb_set_tunnel_key},
    maps::lpm_trie::Key,
    programs::TcContext,
};
use shared_maps::{
    FAMILY_IPV4, IdentityId,
    event::Reason,
    lxc::{FLAG_HOST, LxcKey, LxcValue},
    policy::{EGRESS, INGRESS},
    sources::{SourceKey, SourceValue, tick},
    tunnel::{self, BLOCKS_KNOWN, TunnelConfig},
};

use crate::{
    address::Address,
    config, events,
    from_pod::{DROP, NEXT},
    icmp,
    maps::{self, LXC, SCRATCH, SOURCES, Scratch, TUNNEL, WORLD},
    outside,
    packet::{ETH_LEN, ETH_P_IP, Fragment, Frame, Packet, TCP, UDP, ether_type, load, parse_ip},
    transparent,
};

/// Length of a UDP header.
const UDP_LEN: u32 = 8;
/// Bytes between the outer IP header and the inner one.
const BETWEEN: u32 = UDP_LEN + tunnel::HEADER_LEN + ETH_LEN;
/// Length of an IPv4 header without options.
pub(crate) const IPV4_LEN: u32 = 20;
/// TTL of wrapped packets.
const TTL: u8 = 64;

/// The tunnel's settings; all zero if there are none.
#[inline(always)]
fn settings() -> TunnelConfig {
    match TUNNEL.get(0) {
        Some(settings) => *settings,
        None => TunnelConfig {
            device: 0,
            mtu: 0,
            port: 0,
            flags: 0,
        },
    }
}

/// The pod of this node that has an address, or the node itself.
#[inline(always)]
fn local(address: Address) -> Option<&'static LxcValue> {
    let key = LxcKey {
        ip: address.bytes(),
        family: FAMILY_IPV4,
        key: 0,
        cluster_id: 0,
    };
    // SAFETY: the map is not preallocated, values stay until the grace period.
    unsafe { LXC.get(key) }
}

/// The pod of this node that has an address.
#[inline(always)]
fn local_pod(address: Address) -> Option<&'static LxcValue> {
    local(address).filter(|value| is_pod(value))
}

#[inline(always)]
fn is_pod(value: &LxcValue) -> bool {
    value.flags & FLAG_HOST == 0
}

/// Whether a datagram is for the tunnel's port.
#[inline(always)]
fn is_to_port(packet: &Packet, port: u16) -> bool {
    packet.protocol == UDP && packet.fragment != Fragment::Later && packet.dport == port.to_be()
}

/// Whether an address is outside of the cluster.
#[inline(always)]
fn is_in_world(address: Address) -> bool {
    WORLD.get(Key::new(32, address.v4_bytes())).is_some()
}

/// Identity of an address to which packets are wrapped, as the ipcache has it: a pod of another
/// node. 0: the ipcache has none. `None`: packets to it are not wrapped.
#[inline(never)]
fn wrapped_to(address: Address) -> Option<u32> {
    let number = u32::from_be(address.0[0]);
    let is_link_local = number >> 16 == 0xa9fe;
    if address.is_v4_group() || address.is_v4_loopback() || is_link_local || number >> 24 == 0 {
        return None;
    }
    if local(address).is_some() {
        return None;
    }
    let identity = maps::identity_of(address.bytes(), FAMILY_IPV4).unwrap_or(0);
    if tunnel::is_never_wrapped(IdentityId(identity)) || is_in_world(address) {
        return None;
    }
    Some(identity)
}

// === What a pod sends ===

/// Whether a pod may send a packet: only nodes send to the tunnel's port, because what a peer
/// unwraps names its sender. For nodes that have a mode.
#[inline(always)]
pub(crate) fn guard(packet: &Packet) -> Result<(), Reason> {
    if packet.family != FAMILY_IPV4 || packet.protocol != UDP {
        return Ok(());
    }
    if is_to_port(packet, settings().port) && !is_in_world(packet.daddr) {
        return Err(Reason::TunnelPort);
    }
    Ok(())
}

/// Whether a pod's packet, and each segment of it, can be wrapped if it must be. `mark`: packets with
/// a mark stay on this node.
#[inline(always)]
pub(crate) fn fits(ctx: &TcContext, packet: &Packet, mark: u32) -> Result<(), Reason> {
    if !config::wraps() || packet.family != FAMILY_IPV4 || mark != 0 {
        return Ok(());
    }
    let fits = match settings() {
        settings if settings.device == 0 => 0,
        settings => settings.inner_mtu(),
    };
    if fits != 0 && length_on_wire(ctx, packet) > fits && wrapped_to(packet.daddr).is_some() {
        return Err(Reason::TooBig);
    }
    Ok(())
}

/// Longest IP packet that can be wrapped.
#[inline(always)]
pub(crate) fn inner_mtu() -> u32 {
    settings().inner_mtu()
}

/// Length of the IP packet, or of its longest segment.
#[inline(always)]
fn length_on_wire(ctx: &TcContext, packet: &Packet) -> u32 {
    // SAFETY: the context is valid for the run of the program.
    let segment = unsafe { (*ctx.skb.skb).gso_size };
    if segment == 0 {
        return packet.len - ETH_LEN;
    }
    let header = match packet.protocol {
        TCP => match load::<u8>(ctx, packet.l4 + 12) {
            Ok(offset) => u32::from(offset >> 4) * 4,
            Err(_) => 0,
        },
        _ => UDP_LEN,
    };
    packet.l4 - ETH_LEN + header + segment
}

// === To the network ===

/// TCX egress of a native device.
#[inline(always)]
pub(crate) fn to_net(ctx: &TcContext) -> i32 {
    let Some(scratch) = enter(ctx) else {
        return NEXT;
    };
    // SAFETY: the value is this CPU's own until the program ends.
    let packet = unsafe { &mut (*scratch).packet };
    match Frame::of(ctx) {
        Ok(frame) if !frame.is_to_group() => {}
        _ => return NEXT,
    }
    if !config::guards_tunnel() || !parse(ctx, packet) {
        return NEXT;
    }
    let Some(sender) = local(packet.saddr) else {
        return NEXT;
    };
    let settings = settings();
    if is_to_port(packet, settings.port) {
        // SAFETY: the context is valid for the run of the program.
        let arrival = unsafe { (*ctx.skb.skb).ingress_ifindex };
        // What the tunnel's device sends has arrived nowhere, as what the node itself sends. This one
        // is of a pod: the node translated its port, and perhaps its source, after the pod's own
        // program had seen it.
        if arrival == 0 || is_in_world(packet.daddr) {
            return NEXT;
        }
        return refuse(scratch, sender, Reason::TunnelPort, EGRESS, 0);
    }
    if !is_pod(sender) || !config::wraps() || settings.device == 0 {
        return NEXT;
    }
    let Some(known_as) = wrapped_to(packet.daddr) else {
        return NEXT;
    };
    let vni = tunnel::vni_of_endpoint(IdentityId(sender.sec_id));
    if set_key(ctx, vni, packet.daddr.0[0], packet.saddr.0[0]).is_err() {
        return NEXT;
    }
    let outside = settings.flags & BLOCKS_KNOWN != 0 && known_as == 0;
    let reason = if outside {
        Reason::WrappedOutside
    } else {
        Reason::Wrapped
    };
    events::count(reason, packet.len);
    if outside {
        about(scratch, sender);
        events::record(packet, reason, EGRESS, known_as);
    }
    // SAFETY: the helper takes any number of a device.
    unsafe { bpf_redirect(settings.device, 0) as i32 }
}

/// Has the device wrap the packet. Addresses are in network order.
#[inline(always)]
fn set_key(ctx: &TcContext, vni: u32, remote: u32, local: u32) -> Result<(), ()> {
    // SAFETY: the structure is of numbers only.
    let mut key: bpf_tunnel_key = unsafe { core::mem::zeroed() };
    key.tunnel_id = vni;
    key.tunnel_ttl = TTL;
    key.__bindgen_anon_1.remote_ipv4 = u32::from_be(remote);
    key.__bindgen_anon_3.local_ipv4 = u32::from_be(local);
    let flags = u64::from(BPF_F_ZERO_CSUM_TX | BPF_F_DONT_FRAGMENT);
    // SAFETY: the structure is as long as it is said to be.
    let result = unsafe {
        bpf_skb_set_tunnel_key(
            ctx.skb.skb,
            &raw mut key,
            size_of::<bpf_tunnel_key>() as u32,
            flags,
        )
    };
    if result == 0 { Ok(()) } else { Err(()) }
}

/// Whether the kernel takes the source of what it wraps from a program: 1, or 0. The agent asks
/// before it turns the mode on.
#[inline(always)]
pub(crate) fn probe(ctx: &TcContext) -> i32 {
    const REMOTE: u32 = 0xc000_0201;
    const LOCAL: u32 = 0xc000_0202;
    if set_key(ctx, 1, REMOTE.to_be(), LOCAL.to_be()).is_err() {
        return 0;
    }
    // SAFETY: as in `set_key`.
    unsafe {
        let mut key: bpf_tunnel_key = core::mem::zeroed();
        let len = size_of::<bpf_tunnel_key>() as u32;
        if bpf_skb_get_tunnel_key(ctx.skb.skb, &raw mut key, len, 0) != 0 {
            return 0;
        }
        // Seen as a received packet, in which the source is the other node.
        i32::from(
            key.__bindgen_anon_1.remote_ipv4 == LOCAL && key.__bindgen_anon_3.local_ipv4 == REMOTE,
        )
    }
}

// === From the network ===

/// TCX ingress of a native device.
#[inline(always)]
pub(crate) fn from_net(ctx: &TcContext) -> i32 {
    if config::unwraps() {
        let Some(scratch) = enter(ctx) else {
            return NEXT;
        };
        let result = receive(ctx, scratch);
        if result != NEXT {
            return result;
        }
    }
    if config::transparent() {
        return transparent::run(ctx);
    }
    NEXT
}

/// TCX ingress of the tunnel's device. The kernel unwraps what is sent to the node's own address, from
/// any sender: `from_net` does that for pods, and nothing else is to be unwrapped.
#[inline(always)]
pub(crate) fn from_device(ctx: &TcContext) -> i32 {
    events::count(Reason::TunnelForged, ctx.len());
    DROP
}

#[inline(always)]
fn receive(ctx: &TcContext, scratch: *mut Scratch) -> i32 {
    // SAFETY: the value is this CPU's own until the program ends.
    let packet = unsafe { &mut (*scratch).packet };
    if !parse(ctx, packet) || packet.fragment == Fragment::Later {
        return NEXT;
    }
    let is_wrapped = is_to_port(packet, settings().port);
    if !is_wrapped && !icmp::is_error(packet) {
        return NEXT;
    }
    let Some(pod) = local_pod(packet.daddr) else {
        return NEXT;
    };
    if !is_wrapped {
        outside::translate(ctx, packet, settings().port);
        return NEXT;
    }
    let mut named = 0;
    match unwrap(ctx, packet, &mut named) {
        Ok(()) => {
            events::count(Reason::Unwrapped, packet.len);
            NEXT
        }
        Err(reason) => refuse(scratch, pod, reason, INGRESS, named),
    }
}

/// Removes the outer headers and notes the sender. `named` becomes the identity in the header.
#[inline(always)]
fn unwrap(ctx: &TcContext, packet: &Packet, named: &mut u32) -> Result<(), Reason> {
    let header: [u8; 8] = load(ctx, packet.l4 + UDP_LEN)?;
    *named = tunnel::vni_in(header);
    let ether_type: [u8; 2] = load(ctx, packet.l4 + BETWEEN - 2)?;
    let inner_at = packet.l4 + BETWEEN;
    let inner: [u32; 5] = load(ctx, inner_at)?;
    let Some(identity) = tunnel::identity_of(header) else {
        return Err(Reason::TunnelForged);
    };
    let [version, _, high, low] = inner[0].to_ne_bytes();
    let same_addresses = inner[3] == packet.saddr.0[0] && inner[4] == packet.daddr.0[0];
    // No node fragments what it wrapped.
    if packet.fragment != Fragment::None
        || u16::from_be_bytes(ether_type) != ETH_P_IP
        || version >> 4 != 4
        || version & 0x0f < 5
        || !same_addresses
        || !may_be_of_other_pod(packet.saddr)
    {
        return Err(Reason::TunnelForged);
    }
    check_length(ctx, packet, inner_at, u16::from_be_bytes([high, low]))?;
    let removed = packet.l4 - ETH_LEN + BETWEEN;
    ctx.adjust_room(
        -(removed as i32),
        BPF_ADJ_ROOM_MAC,
        u64::from(BPF_F_ADJ_ROOM_FIXED_GSO),
    )
    .map_err(|_| Reason::Malformed)?;
    note(packet.saddr, identity);
    Ok(())
}

/// Whether the packet ends where the inner one does. The receiving device may have joined datagrams
/// (`rx-udp-gro-forwarding`): of these only the first would be unwrapped.
#[inline(always)]
fn check_length(ctx: &TcContext, packet: &Packet, inner_at: u32, total: u16) -> Result<(), Reason> {
    // The stack writes zero into packets above 64 KiB.
    if total == 0 {
        return Ok(());
    }
    // SAFETY: the context is valid for the run of the program.
    let joined = unsafe { (*ctx.skb.skb).gso_size } != 0;
    let end = inner_at + u32::from(total);
    if end > packet.len || (joined && end < packet.len) {
        return Err(Reason::Malformed);
    }
    Ok(())
}

/// Whether a pod of another node may have an address.
#[inline(never)]
fn may_be_of_other_pod(address: Address) -> bool {
    let identity = maps::identity_of(address.bytes(), FAMILY_IPV4).unwrap_or(0);
    local(address).is_none()
        && !tunnel::is_never_wrapped(IdentityId(identity))
        && !is_in_world(address)
}

#[inline(always)]
fn now() -> u32 {
    // SAFETY: the helper has no preconditions.
    tick(unsafe { bpf_ktime_get_ns() })
}

/// Notes the identity of a source.
#[inline(always)]
fn note(source: Address, identity: IdentityId) {
    let key = SourceKey {
        ip: source.v4_bytes(),
    };
    let (identity, now) = (identity.0, now());
    // SAFETY: the value is read at once; the kernel reuses entries that it displaces, so that it may
    // be another source's, which makes this one be written again or once too seldom.
    if let Some(known) = unsafe { SOURCES.get(key) }
        && known.says(identity, now)
    {
        return;
    }
    let value = SourceValue {
        identity,
        seen: now,
    };
    // Without an entry the sender has the identity that the ipcache gives it.
    let _ = SOURCES.insert(key, value, 0);
}

/// Identity with which the last packets of a source came, if they came by the tunnel.
#[inline(always)]
pub(crate) fn identity_of_source(address: Address, family: u8) -> Option<u32> {
    if !config::unwraps() || family != FAMILY_IPV4 {
        return None;
    }
    let key = SourceKey {
        ip: address.v4_bytes(),
    };
    // SAFETY: the value is copied at once.
    let value = *unsafe { SOURCES.get(key) }?;
    value.is_fresh(now()).then_some(value.identity)
}

/// Counts a packet from an address that the ipcache has as a pod's of another node, and that did not come
/// by the tunnel: the other node does not wrap, or something on the way has unwrapped it.
#[inline(always)]
pub(crate) fn count_plain(ctx: &TcContext, identity: u32) {
    if config::unwraps() && IdentityId(identity).is_endpoint() {
        events::count(Reason::Plain, ctx.len());
    }
}

// === Common ===

/// Prepares the scratch for a packet that a native device sends or receives.
#[inline(always)]
fn enter(ctx: &TcContext) -> Option<*mut Scratch> {
    let scratch = SCRATCH.get_ptr_mut(0)?;
    config::enter_without_endpoint(scratch);
    // SAFETY: the value is this CPU's own until the program ends.
    unsafe { (*scratch).packet.reset(ctx.len()) };
    Some(scratch)
}

/// Whether the packet is a readable one of IPv4.
#[inline(always)]
fn parse(ctx: &TcContext, packet: &mut Packet) -> bool {
    ether_type(ctx).is_ok_and(|kind| kind == ETH_P_IP)
        && parse_ip(ctx, ETH_LEN, FAMILY_IPV4, false, packet).is_ok()
}

/// Records are about this pod.
#[inline(always)]
fn about(scratch: *mut Scratch, pod: &LxcValue) {
    // SAFETY: the value is this CPU's own until the program ends.
    unsafe {
        (*scratch).endpoint.id = pod.lxc_id;
        (*scratch).endpoint.ifindex = pod.ifindex;
    }
}

/// Drops a packet to or from a pod of this node.
#[inline(always)]
fn refuse(scratch: *mut Scratch, pod: &LxcValue, reason: Reason, way: u8, identity: u32) -> i32 {
    about(scratch, pod);
    // SAFETY: the value is this CPU's own until the program ends.
    let packet = unsafe { &(*scratch).packet };
    events::count(reason, packet.len);
    events::record(packet, reason, way, identity);
    DROP
}
