//! Drops every packet of a closed interface: one that leads to a pod whose endpoint is not under policy there
//! yet, or to a namespace that an endpoint has left.

use aya_ebpf::programs::TcContext;
use shared_maps::event::Reason;

use crate::{events, from_pod::DROP};

/// Drops every packet, and counts it as [`Reason::NoEndpoint`].
#[inline(always)]
pub(crate) fn run(ctx: &TcContext) -> i32 {
    events::count(Reason::NoEndpoint, ctx.len());
    DROP
}
