//! The eBPF programs of an endpoint.
//!
//! ```text
//!  pod ──► from_pod ──► stack ──► (marked: local delivery) ──► steer ──► a proxy's socket
//!  pod ◄── to_pod  ◄── stack ◄── proxy's answer, other traffic
//!                        ▲
//!                     to_proxy ◄── other interfaces: an answer to a query that a proxy
//!                                  sent under a pod's address is marked for local delivery
//! ```
//!
//! Between nodes that carry identities (tunnel.rs), native devices have `from_net` and `to_net`.
//!
//! `from_pod` and `to_pod` are loaded once by each agent. They find the endpoint's
//! settings and its policy map by the packet's interface ([`config`]). `to_proxy` is
//! loaded once per kind of interface. Every other map is shared through its pin. `steer` is an object
//! of its own (steer.rs).
#![no_std]
#![no_main]
#![expect(
    unreachable_pub,
    reason = "the macros of aya-ebpf wrap the entry points in public functions of their own"
)]

mod address;
mod closed;
mod config;
mod conntrack;
mod deny_response;
mod events;
mod fragment;
mod from_pod;
mod icmp;
mod maps;
mod neighbour;
mod netfilter;
mod outside;
mod packet;
mod policy;
mod policy_trie;
mod quota;
mod recent;
mod redirect;
mod sender;
mod to_pod;
mod transparent;
mod tunnel;
mod unanswered;
mod words;

use aya_ebpf::{macros::classifier, programs::TcContext};

/// Packets that the pod sends: TCX ingress of its host-side interface.
#[classifier]
pub fn from_pod(ctx: TcContext) -> i32 {
    from_pod::run(&ctx)
}

/// Packets that the pod receives: TCX egress of its host-side interface.
#[classifier]
pub fn to_pod(ctx: TcContext) -> i32 {
    to_pod::run(&ctx)
}

/// Packets of an interface of which the agent has not found the pod yet: TCX ingress and egress.
#[classifier]
pub fn closed(ctx: TcContext) -> i32 {
    closed::run(&ctx)
}

/// Packets from outside: TCX ingress of an interface that is not a pod's.
#[classifier]
pub fn to_proxy(ctx: TcContext) -> i32 {
    transparent::run(&ctx)
}

/// Packets from other nodes: TCX ingress of a native device. Does the work of `to_proxy` too.
#[classifier]
pub fn from_net(ctx: TcContext) -> i32 {
    tunnel::from_net(&ctx)
}

/// Packets to other nodes: TCX egress of a native device.
#[classifier]
pub fn to_net(ctx: TcContext) -> i32 {
    tunnel::to_net(&ctx)
}

/// What the kernel unwraps by itself: TCX ingress of the tunnel's device.
#[classifier]
pub fn from_tunnel(ctx: TcContext) -> i32 {
    tunnel::from_device(&ctx)
}

/// Attached to nothing: the agent runs it once.
#[classifier]
pub fn tunnel_probe(ctx: TcContext) -> i32 {
    tunnel::probe(&ctx)
}

#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// Helpers such as `bpf_ktime_get_ns` are for GPL-compatible programs only.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
