//! Packets that the pod receives.

use aya_ebpf::{helpers::bpf_sk_fullsock, programs::TcContext};
use shared_maps::{
    FAMILY_IPV4, FAMILY_IPV6, IdentityId,
    conntrack::{DIR_IN, DIR_OUT, FLAG_FROM_PROXY, FLAG_FROM_TUNNEL},
    event::Reason,
    mark,
    policy::INGRESS,
};

use crate::{
    config,
    conntrack::{self, As, Forwarded, Side, Tracked},
    events, fragment,
    from_pod::{DROP, Trace, finish},
    icmp,
    maps::SCRATCH,
    neighbour,
    packet::{
        ETH_LEN, ETH_P_ARP, ETH_P_IP, ETH_P_IPV6, Fragment, Packet, UDP, ether_type, parse_ip,
    },
    policy,
    redirect::{self, Note},
    sender::{self, Sender},
};

/// Mark and interface by which the sender is found.
#[derive(Clone, Copy)]
struct Origin {
    /// Mark of the socket that sent it, or the packet's own mark if no full socket sent it.
    mark: u32,
    /// Interface at which this node received it; 0: a packet made on this node.
    arrival: u32,
}

impl Origin {
    #[inline(always)]
    fn of(ctx: &TcContext) -> Self {
        // SAFETY: the context is valid for the run of the program.
        let (mark, arrival) = unsafe { ((*ctx.skb.skb).mark, (*ctx.skb.skb).ingress_ifindex) };
        Self {
            mark: mark_of_socket(ctx).unwrap_or(mark),
            arrival,
        }
    }

    #[inline(always)]
    fn is_local(self) -> bool {
        self.arrival == 0
    }

    /// Whether a socket of the DNS proxy sent it. Setting a mark needs CAP_NET_ADMIN or CAP_NET_RAW
    /// in the node's namespace, and marks do not cross namespaces.
    #[inline(always)]
    fn is_proxy(self) -> bool {
        self.is_local() && mark::magic(self.mark) == mark::MAGIC_FROM_EGRESS_PROXY
    }

    /// Whether it is an answer of the proxy, which carries no identity. A query that the proxy
    /// sends carries the identity of its client.
    #[inline(always)]
    fn is_answer(self) -> bool {
        self.is_proxy() && mark::identity_of(self.mark).0 == 0
    }

    /// [`FLAG_FROM_PROXY`] for a query that the proxy sends, otherwise 0.
    #[inline(always)]
    fn kind(self) -> u16 {
        if self.is_proxy() && !self.is_answer() {
            FLAG_FROM_PROXY
        } else {
            0
        }
    }

    #[inline(always)]
    fn sender(self, ctx: &TcContext, packet: &Packet) -> Sender {
        if self.arrival != 0 {
            return sender::of_forwarded(ctx, packet, self.arrival);
        }
        let magic = mark::magic(self.mark);
        let marked = mark::identity_of(self.mark).0;
        let carries = magic == mark::MAGIC_FROM_EGRESS_PROXY || magic == mark::MAGIC_IDENTITY;
        Sender {
            identity: if carries && marked != 0 {
                marked
            } else {
                IdentityId::HOST.0
            },
            is_receiver: false,
            by_tunnel: false,
        }
    }
}

/// Mark of the full socket that sent the packet. Netfilter rules of other systems rewrite marks of
/// packets, never those of sockets.
///
/// `None` for a SYN-ACK and for the last segments of a connection, which have no full socket.
/// `None` for a socket without an IP protocol (`AF_PACKET`), which marks packet by packet.
#[inline(always)]
fn mark_of_socket(ctx: &TcContext) -> Option<u32> {
    // SAFETY: the context is valid for the run of the program; the helper
    // gets a pointer that is not null, and each field is read by itself.
    unsafe {
        let socket = (*ctx.skb.skb).__bindgen_anon_2.sk;
        if socket.is_null() {
            return None;
        }
        let full = bpf_sk_fullsock(socket);
        if full.is_null() {
            return None;
        }
        let protocol = (&raw const (*full).protocol).read_volatile();
        let mark = (&raw const (*full).mark).read_volatile();
        (protocol != 0).then_some(mark)
    }
}

#[inline(always)]
pub(crate) fn run(ctx: &TcContext) -> i32 {
    let Some(scratch) = SCRATCH.get_ptr_mut(0) else {
        return DROP;
    };
    if !config::enter(ctx, scratch) {
        events::count(Reason::NoEndpoint, ctx.len());
        return DROP;
    }
    // SAFETY: the value is this CPU's own until the program ends.
    let packet = unsafe { &mut (*scratch).packet };
    packet.reset(ctx.len());
    let mut trace = Trace {
        remote_identity: 0,
        new: false,
    };
    let verdict = judge(ctx, packet, &mut trace);
    finish(packet, &trace, verdict, INGRESS)
}

#[inline(always)]
fn judge(ctx: &TcContext, packet: &mut Packet, trace: &mut Trace) -> Result<Reason, Reason> {
    match ether_type(ctx)? {
        ETH_P_IP => {
            parse_ip(ctx, ETH_LEN, FAMILY_IPV4, false, packet)?;
            if !config::is_own_or_group_v4(packet.daddr) {
                return Err(Reason::Misaddressed);
            }
        }
        ETH_P_IPV6 => {
            parse_ip(ctx, ETH_LEN, FAMILY_IPV6, false, packet)?;
            if packet.fragment == Fragment::None && neighbour::is_link_message(packet) {
                return neighbour::message_to_pod(ctx, packet);
            }
            if !config::is_own_or_group_v6(packet.daddr) {
                return Err(Reason::Misaddressed);
            }
        }
        ETH_P_ARP => return neighbour::arp_to_pod(ctx, packet),
        _ => return Err(Reason::UnknownProtocol),
    }
    if packet.fragment == Fragment::Later {
        fragment::follow(packet, INGRESS)?;
        return Ok(Reason::Allowed);
    }
    let verdict = judge_flow(ctx, packet, trace);
    if packet.fragment == Fragment::First {
        fragment::remember(packet, INGRESS, 0, verdict.is_ok());
    }
    verdict
}

#[inline(always)]
fn judge_flow(ctx: &TcContext, packet: &Packet, trace: &mut Trace) -> Result<Reason, Reason> {
    let origin = Origin::of(ctx);
    if icmp::is_error(packet) {
        if icmp::is_to_pod_related(ctx, packet, origin.is_local()) {
            return Ok(Reason::Reply);
        }
    } else {
        // Packets to the proxy have no connection entry. Their answers are recognised by the
        // server's redirect entry.
        let note = redirect::of_sender(packet);
        if note != Note::None && origin.is_proxy() {
            return Ok(Reason::Reply);
        }
        if !packet.is_syn() {
            let now = conntrack::now();
            let tracked = conntrack::look(packet, DIR_OUT, As::Reply, now);
            if let Tracked::Live(value) | Tracked::Refused(value) = tracked {
                if matches!(tracked, Tracked::Refused(_)) {
                    return Err(Reason::PolicyDenied);
                }
                conntrack::touch(value, packet, Side::Remote, As::Reply, now);
                return Ok(Reason::Reply);
            }
            // The redirect entry may have been evicted. Policy then says where the pod's packets
            // go.
            if note == Note::None && policy::redirects_replies_to(packet) {
                if origin.is_answer() {
                    return Ok(Reason::Reply);
                }
                // The others are not forged: a segment of a connection that the server opened, or a
                // query of the proxy. Ingress policy judges them below.
                if packet.protocol == UDP && !origin.is_proxy() {
                    return Err(Reason::ForgedAnswer);
                }
            }
        }
        if note == Note::Redirected {
            return Err(Reason::ForgedAnswer);
        }
    }

    let Sender {
        identity,
        is_receiver,
        by_tunnel,
    } = origin.sender(ctx, packet);
    trace.remote_identity = identity;
    if is_receiver {
        // Policy judges no packet of a pod to itself.
    } else if identity == IdentityId::HOST.0 {
        policy::judge_of_node(packet)?;
    } else {
        policy::judge(packet, identity, INGRESS)?;
    }
    // Replies are judged by the identity in the entry. HOST there means that they are not judged.
    let opened_by = if is_receiver {
        IdentityId::HOST.0
    } else {
        identity
    };
    let kind = if by_tunnel {
        FLAG_FROM_TUNNEL
    } else {
        origin.kind()
    };
    match conntrack::forward(packet, DIR_IN, Side::Remote, kind, opened_by) {
        Forwarded::Known => {}
        Forwarded::New => trace.new = true,
        Forwarded::Full => events::count(Reason::ConntrackFull, packet.len),
    }
    Ok(Reason::Allowed)
}
