//! Answers to queries that a proxy sent from a pod's address.
//!
//! They are addressed to the pod, but the socket that waits for them is on this node. The stack
//! would find that socket before it routes the packet, and drops a packet that has a socket and has
//! to be forwarded. This program therefore marks the packet before, and the routing rule for
//! packets to the proxy delivers it on this node.

use aya_ebpf::{
    bindings::bpf_sock,
    helpers::{bpf_sk_fullsock, bpf_sk_lookup_udp, bpf_sk_release, bpf_skc_lookup_tcp},
    programs::TcContext,
};
use shared_maps::{
    FAMILY_IPV4, FAMILY_IPV6,
    event::Reason,
    lxc::{FLAG_HOST, LxcKey},
    mark,
    policy::INGRESS,
};

use crate::{
    address::Address,
    config, events, fragment,
    from_pod::{NEXT, PASS},
    icmp,
    maps::{LXC, SCRATCH},
    packet::{ETH_P_IP, ETH_P_IPV6, Fragment, Packet, TCP, UDP, ether_type, parse_ip},
    redirect::{self, Note, Server},
};

/// `TCP_ESTABLISHED`. A UDP socket in this state is connected.
const ESTABLISHED: u32 = 1;
/// `TCP_TIME_WAIT`.
const TIME_WAIT: u32 = 6;
/// `TCP_LISTEN`.
const LISTEN: u32 = 10;
/// `BPF_F_CURRENT_NETNS`: the network namespace of the interface.
const THIS_NETNS: u64 = u64::MAX;

/// Packets from outside of the node: TCX ingress of an interface that is not a pod's.
#[inline(always)]
pub(crate) fn run(ctx: &TcContext) -> i32 {
    let Some(scratch) = SCRATCH.get_ptr_mut(0) else {
        return NEXT;
    };
    config::enter_without_endpoint(scratch);
    // SAFETY: the value is this CPU's own until the program ends.
    let packet = unsafe { &mut (*scratch).packet };
    packet.reset(ctx.len());
    if is_answer(ctx, packet) {
        ctx.set_mark(mark::MAGIC_TO_PROXY);
        events::count(Reason::Returned, packet.len);
        // No other program may redirect it, as with an endpoint's packets.
        return PASS;
    }
    NEXT
}

#[inline(always)]
fn is_answer(ctx: &TcContext, packet: &mut Packet) -> bool {
    let family = match ether_type(ctx) {
        Ok(ETH_P_IP) => FAMILY_IPV4,
        Ok(ETH_P_IPV6) => FAMILY_IPV6,
        _ => return false,
    };
    if parse_ip(ctx, config::link_header(), family, false, packet).is_err() {
        return false;
    }
    if packet.fragment == Fragment::Later {
        return fragment::follow(packet, INGRESS).is_ok();
    }
    let is_answer = is_for_proxy(ctx, packet);
    if is_answer && packet.fragment == Fragment::First {
        fragment::remember(packet, INGRESS, mark::MAGIC_TO_PROXY, true);
    }
    is_answer
}

/// Whether a packet belongs to a flow that a proxy of this node opened from the pod's address. The
/// pod's packets to that server then go to the proxy, and the proxy has a socket of exactly this
/// flow. An ICMP error about such a flow belongs to it too.
#[inline(never)]
pub(crate) fn is_for_proxy(ctx: &TcContext, packet: &Packet) -> bool {
    let key = LxcKey {
        ip: packet.daddr.bytes(),
        family: packet.family,
        key: 0,
        cluster_id: 0,
    };
    // SAFETY: the map is not preallocated, values stay until the grace period.
    let Some(pod) = (unsafe { LXC.get(key) }) else {
        return false;
    };
    if pod.flags & FLAG_HOST != 0 {
        return false;
    }
    if icmp::is_error(packet) {
        // The quoted packet has the opposite direction.
        let Some(quoted) = icmp::quoted(ctx, packet) else {
            return false;
        };
        return quoted.saddr.is(packet.daddr)
            && has_socket(ctx, quoted.protocol, &Flow::sent(quoted));
    }
    has_socket(ctx, packet.protocol, &Flow::received(packet))
}

/// A flow as seen from this node. Ports in network order.
struct Flow {
    family: u8,
    remote: Address,
    local: Address,
    remote_port: u16,
    local_port: u16,
}

impl Flow {
    #[inline(always)]
    fn received(packet: &Packet) -> Self {
        Self {
            family: packet.family,
            remote: packet.saddr,
            local: packet.daddr,
            remote_port: packet.sport,
            local_port: packet.dport,
        }
    }

    #[inline(always)]
    fn sent(packet: &Packet) -> Self {
        Self {
            family: packet.family,
            remote: packet.daddr,
            local: packet.saddr,
            remote_port: packet.dport,
            local_port: packet.sport,
        }
    }
}

#[inline(always)]
fn has_socket(ctx: &TcContext, protocol: u8, flow: &Flow) -> bool {
    if protocol != TCP && protocol != UDP {
        return false;
    }
    let server = Server {
        address: flow.remote,
        port: flow.remote_port,
        protocol,
        family: flow.family,
    };
    if redirect::look(&server, flow.local) == Note::None {
        return false;
    }
    if protocol == TCP {
        has_tcp_socket(ctx, flow)
    } else {
        has_udp_socket(ctx, flow)
    }
}

/// `struct bpf_sock_tuple` and its length. The source is outside of the node.
#[inline(always)]
fn tuple(flow: &Flow) -> ([u32; 9], u32) {
    let ports = u32::from_ne_bytes({
        let [a, b] = flow.remote_port.to_ne_bytes();
        let [c, d] = flow.local_port.to_ne_bytes();
        [a, b, c, d]
    });
    let (r, l) = (flow.remote.0, flow.local.0);
    if flow.family == FAMILY_IPV4 {
        ([r[0], l[0], ports, 0, 0, 0, 0, 0, 0], 12)
    } else {
        ([r[0], r[1], r[2], r[3], l[0], l[1], l[2], l[3], ports], 36)
    }
}

/// Whether the socket found for a flow is a proxy's socket of this flow. All other sockets that the
/// lookup can find have no peer.
#[inline(always)]
fn has_udp_socket(ctx: &TcContext, flow: &Flow) -> bool {
    let (mut tuple, size) = tuple(flow);
    // SAFETY: the context is valid for the run of the program, and the tuple as
    // long as it is said to be.
    let socket = unsafe {
        bpf_sk_lookup_udp(
            ctx.skb.skb.cast(),
            (&raw mut tuple).cast(),
            size,
            THIS_NETNS,
            0,
        )
    };
    if socket.is_null() {
        return false;
    }
    // SAFETY: not null, held until it is released; each field is read by
    // itself, as the verifier wants it.
    unsafe {
        let state = (&raw const (*socket).state).read_volatile();
        let set = (&raw const (*socket).mark).read_volatile();
        bpf_sk_release(socket.cast());
        state == ESTABLISHED && mark::magic(set) == mark::MAGIC_FROM_EGRESS_PROXY
    }
}

/// Like [`has_udp_socket`]. A closed connection that still waits for the last segments has no mark.
/// Under an address that is not the node's own, all sockets are transparent ones, so that no mark
/// is needed.
#[inline(always)]
fn has_tcp_socket(ctx: &TcContext, flow: &Flow) -> bool {
    let (mut tuple, size) = tuple(flow);
    // SAFETY: as in `has_udp_socket`.
    let socket: *mut bpf_sock = unsafe {
        bpf_skc_lookup_tcp(
            ctx.skb.skb.cast(),
            (&raw mut tuple).cast(),
            size,
            THIS_NETNS,
            0,
        )
    };
    if socket.is_null() {
        return false;
    }
    // SAFETY: as in `has_udp_socket`.
    unsafe {
        let state = (&raw const (*socket).state).read_volatile();
        let full = bpf_sk_fullsock(socket);
        let set = if full.is_null() {
            0
        } else {
            (&raw const (*full).mark).read_volatile()
        };
        bpf_sk_release(socket.cast());
        if state == TIME_WAIT {
            return true;
        }
        state != LISTEN && mark::magic(set) == mark::MAGIC_FROM_EGRESS_PROXY
    }
}
