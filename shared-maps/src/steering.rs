//! The replica that gets a redirected packet.
//!
//! A slot belongs to one worker of one replica. Its sockets are in `hf_steer_socks_v1` at
//! [`socket_index`], its heartbeat is in `hf_steer_slots_v1` at the slot's number.
//!
//! The `sk_lookup` program selects a slot by flow hash among the live ones, whose heartbeat is
//! younger than [`HEARTBEAT_DEAD_NS`]. SDP slots come before fallback slots (the agent's built-in
//! proxy).
//!
//! If no slot is live, the program selects a silent slot whose socket still exists, because no other
//! process would get that packet. For a packet that came by TPROXY it selects nothing, and the hash of
//! the sockets' reuse-port group decides.

/// Sockmap: pin and map name.
pub const SOCKS_NAME: &str = "hf_steer_socks_v1";
/// Slot table (array of [`Slot`]): pin and map name.
pub const SLOTS_NAME: &str = "hf_steer_slots_v1";
/// Pin name of the link of the `sk_lookup` program.
pub const LINK_NAME: &str = "hf_steer_link_v1";
/// Global of the program, u32: 0 if the kernel does not show by which interface a packet came.
pub const SHOWS_INTERFACE: &str = "SHOWS_INTERFACE";
/// Number of slots, for all proxies of the node together.
pub const SLOTS: u32 = 16;
/// Sockets per slot: UDP and TCP, IPv4 and IPv6.
pub const SOCKS_PER_SLOT: u32 = 4;
/// A slot with an older heartbeat, in nanoseconds, gets no new packets while another slot is live.
pub const HEARTBEAT_DEAD_NS: u64 = 750_000_000;
/// How often a live replica beats, milliseconds.
pub const HEARTBEAT_INTERVAL_MS: u64 = 150;

/// Slot kind: no proxy has the slot.
pub const KIND_FREE: u32 = 0;
/// Slot kind: a standalone proxy.
pub const KIND_SDP: u32 = 1;
/// Slot kind: the agent's built-in proxy, used when no SDP slot is live.
pub const KIND_FALLBACK: u32 = 2;

/// Entry of the slot table, which the owner of the slot writes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slot {
    /// Last sign of life, nanoseconds of CLOCK_MONOTONIC.
    pub heartbeat: u64,
    /// [`KIND_FREE`], [`KIND_SDP`] or [`KIND_FALLBACK`].
    pub kind: u32,
    /// Process id of the owner, by which a process recognises its own slots.
    pub owner: u32,
    /// Bit `socket_index(0, ..)` is set if the slot has that socket.
    pub sockets: u32,
    /// Proxy port the sockets are bound to, host order.
    pub proxy_port: u32,
}

/// Index of a slot's socket in the sockmap.
#[inline(always)]
pub const fn socket_index(slot: u32, tcp: bool, v6: bool) -> u32 {
    slot * SOCKS_PER_SLOT + (tcp as u32) * 2 + v6 as u32
}
