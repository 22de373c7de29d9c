//! `steer` selects the proxy's socket that gets a redirected packet.
//!
//! It is an object of its own and needs no map of the endpoints. A proxy under another agent can
//! therefore load it without access to that agent's maps.
#![no_std]
#![no_main]
#![expect(
    unreachable_pub,
    reason = "the macros of aya-ebpf wrap the entry points in public functions of their own"
)]

#[expect(dead_code, reason = "the programs of an endpoint use the rest")]
mod address;
mod slots;

use aya_ebpf::{
    Global,
    bindings::{BPF_SK_LOOKUP_F_NO_REUSEPORT, bpf_sk_lookup},
    helpers::bpf_ktime_get_ns,
    macros::sk_lookup,
    programs::SkLookupContext,
};
use shared_maps::{
    Be16, FAMILY_IPV4, FAMILY_IPV6,
    redirect::RedirectKey,
    steering::{
        HEARTBEAT_DEAD_NS, KIND_FALLBACK, KIND_FREE, KIND_SDP, SLOTS as SLOT_COUNT, socket_index,
    },
};

use crate::{
    address::Address,
    slots::{RANKS, REDIRECTS, Ranks, SLOTS, SOCKS},
};

const TCP: u32 = 6;
const UDP: u32 = 17;
const AF_INET: u32 = 2;
const AF_INET6: u32 = 10;
const SK_PASS: u32 = 1;
const SK_DROP: u32 = 0;
/// Index of the loopback interface, in every network namespace (`LOOPBACK_IFINDEX`).
const LOOPBACK: u32 = 1;
/// Maximum number of slots that are tried if sockets are missing. A killed proxy loses the sockets of
/// all its slots at once.
const ATTEMPTS: u32 = 8;
/// Bits of a rank that are the slot's number.
const SLOT_MASK: u32 = SLOT_COUNT - 1;
const _: () = assert!(SLOT_COUNT.is_power_of_two());

/// Set by the loader: whether the kernel shows by which interface a packet came, as Linux 5.17 and
/// later do. If it is 0, the code that reads the interface is not even verified.
#[unsafe(no_mangle)]
static SHOWS_INTERFACE: Global<u32> = Global::new(1);

/// On the node's network namespace.
#[sk_lookup]
pub fn steer(ctx: SkLookupContext) -> u32 {
    match choose(&ctx) {
        // The packet still has its first destination. If it passed, it would reach a server of this
        // node instead of the proxy.
        // A local process would use up the queues of pods.
        Some(Choice::Nobody | Choice::Local) => SK_DROP,
        Some(Choice::Made | Choice::LeftToHash) | None => SK_PASS,
    }
}

/// Result for a packet that belongs to the proxy.
#[derive(Clone, Copy)]
enum Choice {
    /// A socket of a slot is selected.
    Made,
    /// Redirected by us, and no slot has a socket.
    Nobody,
    /// Sent to the proxy's own address by a process of the node.
    Local,
    /// Redirected by TPROXY, and no slot is live: the reuse-port group selects the socket.
    LeftToHash,
}

/// Selects a socket if the packet is for the proxy and a slot is live. `None` for other packets.
#[inline(always)]
fn choose(ctx: &SkLookupContext) -> Option<Choice> {
    let at: *const bpf_sk_lookup = ctx.lookup;
    // SAFETY: the context is valid for the run of the program; each field is
    // read by itself with its own width, as the verifier wants it.
    let (family, protocol, port, remote_port) = unsafe {
        (
            (&raw const (*at).family).read_volatile(),
            (&raw const (*at).protocol).read_volatile(),
            (&raw const (*at).local_port).read_volatile(),
            (&raw const (*at).remote_port).read_volatile(),
        )
    };
    let tcp = protocol == TCP;
    if !tcp && protocol != UDP {
        return None;
    }
    let v6 = family == AF_INET6;
    if !v6 && family != AF_INET {
        return None;
    }
    // SAFETY: as above. All are read whatever the family: reads under a branch
    // get merged into one at a computed offset, which the verifier refuses.
    let (local4, local6, remote4, remote6) = unsafe {
        (
            (&raw const (*at).local_ip4).read_volatile(),
            [
                (&raw const (*at).local_ip6[0]).read_volatile(),
                (&raw const (*at).local_ip6[1]).read_volatile(),
                (&raw const (*at).local_ip6[2]).read_volatile(),
                (&raw const (*at).local_ip6[3]).read_volatile(),
            ],
            (&raw const (*at).remote_ip4).read_volatile(),
            [
                (&raw const (*at).remote_ip6[0]).read_volatile(),
                (&raw const (*at).remote_ip6[1]).read_volatile(),
                (&raw const (*at).remote_ip6[2]).read_volatile(),
                (&raw const (*at).remote_ip6[3]).read_volatile(),
            ],
        )
    };
    let (local, remote) = if v6 {
        (Address(local6), Address(remote6))
    } else {
        (Address([local4, 0, 0, 0]), Address([remote4, 0, 0, 0]))
    };
    let shows_interface = SHOWS_INTERFACE.load() != 0;
    let ifindex = if shows_interface {
        // SAFETY: as above.
        unsafe { (&raw const (*at).ingress_ifindex).read_volatile() }
    } else {
        0
    };
    let port = port as u16;
    let flow = Flow {
        pod: remote,
        server: local,
        port,
        protocol: protocol as u8,
        family: if v6 { FAMILY_IPV6 } else { FAMILY_IPV4 },
    };
    let redirected = if shows_interface {
        flow.redirected_to(ifindex)
    } else {
        flow.redirected_from_any()
    };
    let (proxy_port, otherwise) = match redirected {
        Some(proxy_port) => (proxy_port, Choice::Nobody),
        // The stack looks up the proxy's own address.
        None if (v6 && local.is_v6_loopback()) || (!v6 && local.is_v4_loopback()) => {
            // A packet that TPROXY redirects has come by the interface of its pod, or by another of
            // the datapath, and no pod has a loopback address.
            let local = if shows_interface {
                ifindex == LOOPBACK
            } else {
                (v6 && remote.is_v6_loopback()) || (!v6 && remote.is_v4_loopback())
            };
            if local {
                return is_proxy_port(u32::from(port)).then_some(Choice::Local);
            }
            (u32::from(port), Choice::LeftToHash)
        }
        None => return None,
    };
    let last = if v6 { remote.0[3] } else { remote.0[0] };
    let hash = flow_hash(last, u32::from(remote_port));
    let wanted = Wanted {
        proxy_port,
        socket: 1 << socket_index(0, tcp, v6),
        // SAFETY: the helper has no preconditions.
        now: unsafe { bpf_ktime_get_ns() },
        hash,
        // Under TPROXY the group's hash selects among proxies without a slot.
        silent_too: matches!(otherwise, Choice::Nobody),
    };
    let flags = u64::from(BPF_SK_LOOKUP_F_NO_REUSEPORT);
    let ranks = RANKS.get_ptr_mut(0)?;
    // SAFETY: the value is this CPU's own, for as long as the program runs.
    unsafe { (&raw mut (*ranks).below).write_volatile(u32::MAX) };
    for _ in 0..ATTEMPTS {
        let best = wanted.best(ranks);
        if best == 0 {
            return Some(otherwise);
        }
        let index = socket_index(best & SLOT_MASK, tcp, v6);
        if SOCKS.redirect_sk_lookup(ctx, index, flags).is_ok() {
            return Some(Choice::Made);
        }
        // SAFETY: as above.
        unsafe { (&raw mut (*ranks).below).write_volatile(best) };
    }
    Some(otherwise)
}

/// Whether a proxy with a slot, live or not, has this port.
#[inline(always)]
fn is_proxy_port(port: u32) -> bool {
    for slot in 0..SLOT_COUNT {
        if let Some(value) = SLOTS.get(slot)
            && value.kind != KIND_FREE
            && value.proxy_port == port
        {
            return true;
        }
    }
    false
}

/// A flow as `from_pod` recorded it. The port is in host order.
struct Flow {
    pod: Address,
    server: Address,
    port: u16,
    protocol: u8,
    family: u8,
}

impl Flow {
    #[inline(always)]
    fn key(&self) -> RedirectKey {
        RedirectKey {
            pod: self.pod.bytes(),
            server: self.server.bytes(),
            port: Be16::new(self.port),
            protocol: self.protocol,
            family: self.family,
        }
    }

    /// Port of the proxy for a flow that is redirected, whatever interface it arrived by.
    #[inline(always)]
    fn redirected_from_any(&self) -> Option<u32> {
        let value = REDIRECTS.get_ptr(self.key())?;
        // SAFETY: racing writers leave an old or a new value.
        let port = unsafe { (*value).proxy_port };
        Some(u32::from(port.get())).filter(|port| *port != 0)
    }

    /// Port of the proxy for a flow that is redirected and arrived by this interface.
    #[inline(always)]
    fn redirected_to(&self, ifindex: u32) -> Option<u32> {
        let value = REDIRECTS.get_ptr(self.key())?;
        // SAFETY: racing writers leave an old or a new value.
        let (port, from) = unsafe { ((*value).proxy_port, (*value).ifindex) };
        // Zero: policy no longer redirects the flow.
        let redirected = port.get() != 0 && (from == 0 || from == ifindex);
        redirected.then(|| u32::from(port.get()))
    }
}

/// Properties that a slot and its socket must have.
struct Wanted {
    proxy_port: u32,
    socket: u32,
    now: u64,
    hash: u32,
    /// If no slot is live, a silent slot is accepted whose socket still exists.
    silent_too: bool,
}

impl Wanted {
    /// Rank of the best live slot that ranks below `ranks.below`; 0 if there is none.
    ///
    /// Each flow ranks the slots in an order of its own. A slot that is added or removed therefore
    /// moves no flow between the other slots. The compared numbers pass through a map, because the
    /// verifier would otherwise follow every possible order.
    #[inline(always)]
    fn best(&self, ranks: *mut Ranks) -> u32 {
        // SAFETY: the value is this CPU's own. Should a softirq interrupt the
        // program, it leaves another live slot's rank.
        unsafe {
            (&raw mut (*ranks).best).write_volatile(0);
            for slot in 0..SLOT_COUNT {
                let Some(value) = SLOTS.get(slot) else {
                    continue;
                };
                if value.proxy_port != self.proxy_port || value.sockets & self.socket == 0 {
                    continue;
                }
                let live = self.now.saturating_sub(value.heartbeat) <= HEARTBEAT_DEAD_NS;
                let class = match value.kind {
                    KIND_SDP if live => 3 << 30,
                    KIND_FALLBACK if live => 2 << 30,
                    KIND_SDP | KIND_FALLBACK if self.silent_too => 1 << 30,
                    _ => continue,
                };
                let spread = mix(self.hash ^ slot.wrapping_mul(0x9e37_79b9)) >> 2;
                let rank = class | (spread & !SLOT_MASK) | slot;
                (&raw mut (*ranks).rank).write_volatile(rank);
                let rank = (&raw const (*ranks).rank).read_volatile();
                if rank > (&raw const (*ranks).best).read_volatile()
                    && rank < (&raw const (*ranks).below).read_volatile()
                {
                    (&raw mut (*ranks).best).write_volatile(rank);
                }
            }
            (&raw const (*ranks).best).read_volatile()
        }
    }
}

/// Spreads flows: consecutive ports must not fall together.
#[inline(always)]
fn flow_hash(address: u32, port: u32) -> u32 {
    address ^ port.wrapping_mul(0x9e37_79b9)
}

/// Finaliser of MurmurHash3: every input bit affects every output bit.
#[inline(always)]
fn mix(mut hash: u32) -> u32 {
    hash ^= hash >> 16;
    hash = hash.wrapping_mul(0x85eb_ca6b);
    hash ^= hash >> 13;
    hash = hash.wrapping_mul(0xc2b2_ae35);
    hash ^ (hash >> 16)
}

#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// Helpers such as `bpf_ktime_get_ns` are for GPL-compatible programs only.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
