//! Packets that the pod sends.

use aya_ebpf::programs::TcContext;
use shared_maps::{
    FAMILY_IPV4, FAMILY_IPV6,
    conntrack::{DIR_IN, DIR_OUT},
    event::Reason,
    mark,
    policy::EGRESS,
};

use crate::{
    config,
    conntrack::{self, As, Forwarded, Side, Tracked},
    deny_response, events, fragment,
    icmp::{self, About},
    maps::{self, SCRATCH},
    neighbour,
    packet::{
        ETH_LEN, ETH_P_ARP, ETH_P_IP, ETH_P_IPV6, Fragment, Frame, Packet, ether_type, parse_ip,
    },
    policy, quota, recent, redirect, transparent, tunnel,
};

/// `TCX_NEXT`: later programs of this interface run, and then the stack.
pub(crate) const NEXT: i32 = -1;
/// `TCX_PASS`: on to the stack at once.
pub(crate) const PASS: i32 = 0;
/// `TCX_DROP`.
pub(crate) const DROP: i32 = 2;

/// Findings on the way to the verdict.
pub(crate) struct Trace {
    pub(crate) remote_identity: u32,
    pub(crate) new: bool,
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
    let result = finish(packet, &trace, verdict, EGRESS);
    match result {
        DROP if config::wraps() && matches!(verdict, Err(Reason::TooBig)) => {
            return deny_response::too_big(ctx, packet, tunnel::inner_mtu());
        }
        DROP => return deny_response::reply(ctx, packet, &trace, verdict),
        // The mark of netfilter's rules: it has come this way, and not past the programs.
        NEXT => ctx.set_mark(mark::JUDGED),
        // Marked for the proxy.
        _ => {}
    }
    result
}

/// Counts the packet, writes its record, and converts the verdict into the program's result. A
/// packet for the proxy ends the chain, so that no other program can redirect it.
#[inline(always)]
pub(crate) fn finish(
    packet: &Packet,
    trace: &Trace,
    verdict: Result<Reason, Reason>,
    egress: u8,
) -> i32 {
    let (reason, result) = match verdict {
        Ok(reason @ (Reason::Redirected | Reason::Returned)) => (reason, PASS),
        Ok(reason) => (reason, NEXT),
        Err(reason) => (reason, DROP),
    };
    events::count(reason, packet.len);
    if result == DROP || trace.new {
        events::record(packet, reason, egress, trace.remote_identity);
    }
    result
}

#[inline(always)]
fn judge(ctx: &TcContext, packet: &mut Packet, trace: &mut Trace) -> Result<Reason, Reason> {
    let kind = ether_type(ctx)?;
    let frame = Frame::of(ctx)?;
    // A bridge would send the answers to this MAC to the pod's port.
    if !config::may_be_own_mac(frame.from) {
        return Err(Reason::SourceMac);
    }
    match kind {
        ETH_P_IP => {
            parse_ip(ctx, ETH_LEN, FAMILY_IPV4, false, packet)?;
            if !config::is_own_v4(packet.saddr) {
                return Err(Reason::SpoofedSource);
            }
            if packet.daddr.is_v4_loopback() {
                return Err(Reason::Loopback);
            }
            if is_shown_to_all(frame) && !config::is_group_v4(packet.daddr) {
                return Err(Reason::Misaddressed);
            }
        }
        ETH_P_IPV6 => {
            parse_ip(ctx, ETH_LEN, FAMILY_IPV6, false, packet)?;
            if packet.fragment == Fragment::None && neighbour::is_link_message(packet) {
                return neighbour::message_from_pod(ctx, packet);
            }
            if !config::is_own_v6(packet.saddr) && !config::is_own_link_local(packet.saddr) {
                return Err(Reason::SpoofedSource);
            }
            if packet.daddr.is_v6_loopback() {
                return Err(Reason::Loopback);
            }
            if is_shown_to_all(frame) && !packet.daddr.is_v6_multicast() {
                return Err(Reason::Misaddressed);
            }
        }
        ETH_P_ARP => return neighbour::arp_from_pod(ctx, packet),
        _ => return Err(Reason::UnknownProtocol),
    }

    if packet.fragment == Fragment::Later {
        let set = fragment::follow(packet, EGRESS)?;
        tunnel::fits(ctx, packet, set)?;
        redirect::deliver(ctx, set)?;
        return Ok(match set {
            0 => Reason::Allowed,
            mark::MAGIC_TO_PROXY => Reason::Returned,
            _ => Reason::Redirected,
        });
    }
    let verdict = match judge_flow(ctx, packet, trace) {
        Ok(mark) if config::guards_tunnel() => tunnel::guard(packet).map(|()| mark),
        verdict => verdict,
    };
    let mark = match verdict {
        Ok((0, _)) if config::transparent() && transparent::is_for_proxy(ctx, packet) => {
            (mark::MAGIC_TO_PROXY, Reason::Returned)
        }
        Ok(mark) => mark,
        Err(reason) => {
            if packet.fragment == Fragment::First {
                fragment::remember(packet, EGRESS, 0, false);
            }
            return Err(reason);
        }
    };
    if packet.fragment == Fragment::First {
        fragment::remember(packet, EGRESS, mark.0, true);
    }
    tunnel::fits(ctx, packet, mark.0)?;
    redirect::deliver(ctx, mark.0)?;
    Ok(mark.1)
}

/// Whether a bridge shows the frame to other machines than the one with the packet's destination.
/// The machine of one MAC is an endpoint, whose `to_pod` compares the destination, or a machine that
/// the agent has no control of.
#[inline(always)]
fn is_shown_to_all(frame: Frame) -> bool {
    frame.is_to_group() && config::is_bridge_port()
}

/// Mark and reason of a packet that has ports, or the reason why it is dropped.
#[inline(always)]
fn judge_flow(
    ctx: &TcContext,
    packet: &Packet,
    trace: &mut Trace,
) -> Result<(u32, Reason), Reason> {
    if icmp::is_error(packet) {
        match icmp::of_pod(ctx, packet) {
            About::Connection => return Ok((0, Reason::Reply)),
            // The error is about a packet that the proxy sent.
            About::Redirected => return Ok((mark::MAGIC_TO_PROXY, Reason::Returned)),
            About::Nothing => {}
        }
    } else if !packet.is_syn() {
        let now = conntrack::now();
        let tracked = conntrack::look(packet, DIR_IN, As::Reply, now);
        if let Tracked::Live(value) | Tracked::Refused(value) = tracked
            && (conntrack::is_opened(value, packet) || !policy::redirects(packet))
        {
            if matches!(tracked, Tracked::Refused(_)) {
                return Err(Reason::PolicyDenied);
            }
            conntrack::touch(value, packet, Side::Local, As::Reply, now);
            return Ok((0, Reason::Reply));
        }
    }

    let identity = maps::identity_or_world(packet.daddr, packet.family);
    trace.remote_identity = identity;
    let judged = policy::judge(packet, identity, EGRESS);
    let proxy = judged.unwrap_or(0);
    if proxy != 0 && !quota::admits_to_proxy(packet) {
        return Err(Reason::OverQuota);
    }
    let noted = !packet.is_redirectable() || redirect::set(packet, proxy);
    judged?;
    if !noted {
        return Err(Reason::RedirectFull);
    }
    if proxy != 0 {
        // `to_pod` recognises answers by the redirect entry. They need no connection entry.
        conntrack::end(packet);
        trace.new = recent::is_new(packet);
        return Ok((mark::to_proxy(u16::from_be(proxy)), Reason::Redirected));
    }
    match conntrack::forward(packet, DIR_OUT, Side::Local, 0, config::identity()) {
        Forwarded::Known => {}
        Forwarded::New => trace.new = true,
        Forwarded::Full => events::count(Reason::ConntrackFull, packet.len),
    }
    Ok((0, Reason::Allowed))
}
