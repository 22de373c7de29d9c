//! Which proxy's socket gets a redirected packet.

use aya_ebpf::{
    bindings::{BPF_SK_LOOKUP_F_NO_REUSEPORT, bpf_sk_lookup},
    helpers::bpf_ktime_get_ns,
    programs::SkLookupContext,
};
use shared_maps::{
    Be16, FAMILY_IPV4, FAMILY_IPV6,
    redirect::RedirectKey,
    steering::{HEARTBEAT_DEAD_NS, KIND_FALLBACK, KIND_SDP, SLOTS as SLOT_COUNT, socket_index},
};

use crate::{
    address::Address,
    maps::{REDIRECTS, SLOTS, SOCKS},
    packet::{TCP, UDP},
};

const AF_INET: u32 = 2;
const AF_INET6: u32 = 10;
/// `SK_PASS`.
const SK_PASS: u32 = 1;
/// How many slots are tried when sockets are gone that should be there.
const ATTEMPTS: u32 = 4;

#[inline(always)]
pub(crate) fn run(ctx: &SkLookupContext) -> u32 {
    choose(ctx);
    SK_PASS
}

/// Selects a socket if the packet is for the proxy and a slot is live; else nothing.
#[inline(always)]
fn choose(ctx: &SkLookupContext) -> Option<()> {
    let at: *const bpf_sk_lookup = ctx.lookup;
    // SAFETY: the context is valid for the run of the program; each field is
    // read by itself with its own width, as the verifier wants it.
    let (family, protocol, ifindex, port, remote_port) = unsafe {
        (
            (&raw const (*at).family).read_volatile(),
            (&raw const (*at).protocol).read_volatile(),
            (&raw const (*at).ingress_ifindex).read_volatile(),
            (&raw const (*at).local_port).read_volatile(),
            (&raw const (*at).remote_port).read_volatile(),
        )
    };
    let tcp = protocol == u32::from(TCP);
    if !tcp && protocol != u32::from(UDP) {
        return None;
    }
    let v6 = family == AF_INET6;
    if !v6 && family != AF_INET {
        return None;
    }
    // SAFETY: as above; the words of an IPv6 address are read one by one.
    let (local, remote) = unsafe {
        if v6 {
            (
                Address([
                    (&raw const (*at).local_ip6[0]).read_volatile(),
                    (&raw const (*at).local_ip6[1]).read_volatile(),
                    (&raw const (*at).local_ip6[2]).read_volatile(),
                    (&raw const (*at).local_ip6[3]).read_volatile(),
                ]),
                (&raw const (*at).remote_ip6[3]).read_volatile(),
            )
        } else {
            (
                Address([(&raw const (*at).local_ip4).read_volatile(), 0, 0, 0]),
                (&raw const (*at).remote_ip4).read_volatile(),
            )
        }
    };
    let port = port as u16;
    let key = RedirectKey {
        daddr: local.bytes(),
        ifindex,
        dport: Be16::new(port),
        protocol: protocol as u8,
        family: if v6 { FAMILY_IPV6 } else { FAMILY_IPV4 },
    };
    let proxy_port = match REDIRECTS.get_ptr(key) {
        // SAFETY: racing writers leave an old or a new port.
        Some(value) => u32::from(unsafe { (*value).proxy_port }.get()),
        // Redirected by TPROXY: the stack looks the proxy's own address up.
        None if (v6 && local.is_v6_loopback()) || (!v6 && local.is_v4_loopback()) => {
            u32::from(port)
        }
        None => return None,
    };
    let hash = flow_hash(remote, u32::from(remote_port));
    let (first, second) = live(proxy_port, 1 << socket_index(0, tcp, v6));
    pick(ctx, first, hash, tcp, v6).or_else(|| pick(ctx, second, hash, tcp, v6))
}

/// Slots to choose from, as bit sets: proxies, then fallbacks.
#[inline(always)]
fn live(proxy_port: u32, socket: u32) -> (u32, u32) {
    // SAFETY: the helper has no preconditions.
    let now = unsafe { bpf_ktime_get_ns() };
    let (mut sdp, mut fallback) = (0, 0);
    for slot in 0..SLOT_COUNT {
        let Some(value) = SLOTS.get(slot) else {
            continue;
        };
        if value.proxy_port != proxy_port
            || value.sockets & socket == 0
            || now.saturating_sub(value.heartbeat) > HEARTBEAT_DEAD_NS
        {
            continue;
        }
        match value.kind {
            KIND_SDP => sdp |= 1 << slot,
            KIND_FALLBACK => fallback |= 1 << slot,
            _ => {}
        }
    }
    (sdp, fallback)
}

/// Selects the socket of one of `slots` by `hash`; of another if that socket is gone.
#[inline(always)]
fn pick(ctx: &SkLookupContext, mut slots: u32, hash: u32, tcp: bool, v6: bool) -> Option<()> {
    for _ in 0..ATTEMPTS {
        if slots == 0 {
            return None;
        }
        let slot = nth(slots, hash % slots.count_ones());
        let index = socket_index(slot, tcp, v6);
        let flags = u64::from(BPF_SK_LOOKUP_F_NO_REUSEPORT);
        if SOCKS.redirect_sk_lookup(ctx, index, flags).is_ok() {
            return Some(());
        }
        slots &= !(1 << slot);
    }
    None
}

/// Number of the `n`-th set bit of `bits`.
#[inline(always)]
fn nth(bits: u32, mut n: u32) -> u32 {
    for slot in 0..SLOT_COUNT {
        if bits & (1 << slot) != 0 {
            if n == 0 {
                return slot;
            }
            n -= 1;
        }
    }
    0
}

/// Spreads flows: consecutive ports must not fall together.
#[inline(always)]
fn flow_hash(address: u32, port: u32) -> u32 {
    let mut hash = address ^ port.wrapping_mul(0x9e37_79b9);
    hash ^= hash >> 16;
    hash = hash.wrapping_mul(0x85eb_ca6b);
    hash ^= hash >> 13;
    hash = hash.wrapping_mul(0xc2b2_ae35);
    hash ^ (hash >> 16)
}
