//! The maps that `steer` reads. The name of a pinned map is the name of its pin.

use aya_ebpf::{
    macros::map,
    maps::{Array, LruHashMap, PerCpuArray, SockMap},
};
use shared_maps::{
    redirect::{self, RedirectKey, RedirectValue},
    steering::{self, SOCKS_PER_SLOT, Slot},
};

/// Pairs of pod and server that are or were redirected to the proxy. `from_pod` writes them.
#[map(name = "hf_redirect_v2")]
pub(crate) static REDIRECTS: LruHashMap<RedirectKey, RedirectValue> =
    LruHashMap::pinned(redirect::MAX_ENTRIES, 0);

#[map(name = "hf_steer_slots_v1")]
pub(crate) static SLOTS: Array<Slot> = Array::pinned(steering::SLOTS, 0);

#[map(name = "hf_steer_socks_v1")]
pub(crate) static SOCKS: SockMap = SockMap::pinned(steering::SLOTS * SOCKS_PER_SLOT, 0);

/// Memory for comparing slots; not pinned.
#[map(name = "RANKS")]
pub(crate) static RANKS: PerCpuArray<Ranks> = PerCpuArray::with_max_entries(1, 0);

/// Ranks of slots: the current one, the best so far, and the limit that the current one must be
/// below.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Ranks {
    pub(crate) rank: u32,
    pub(crate) best: u32,
    pub(crate) below: u32,
}
