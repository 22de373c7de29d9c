//! Layouts that the kernel and user space share. No other crate defines one.
//!
//! ```text
//!  bpf/ (kernel) ──► shared-maps ◄── agent (reads and writes)
//!                         ▲
//!                         └──────── sdp (reads lxc and ipcache, writes its steering slots)
//! ```
//!
//! Every key and value is `repr(C)` with explicit padding. It has no `bool`, enum or `Option`.
//! `layout.rs` checks its size and field offsets at compile time. Fields that are big-endian on the
//! wire are of type [`Be16`] or byte arrays. Every other integer is in host byte order.
//!
//! The crate is `no_std` and has no dependencies. The feature `user` adds typed readers and writers
//! of the pinned maps, with `std` and dependencies.
#![warn(missing_docs)]
#![cfg_attr(not(feature = "user"), no_std)]

pub(crate) mod byteorder;
pub mod conntrack;
pub mod endpoint;
pub mod event;
pub mod fragment;
pub mod identity;
pub mod ipcache;
pub(crate) mod layout;
pub mod lxc;
pub mod mark;
pub mod netfilter;
pub mod pin;
pub mod policy;
pub mod policystats;
pub mod quota;
pub mod redirect;
pub mod sources;
pub mod steering;
pub mod tunnel;
#[cfg(feature = "user")]
pub mod user;
mod words;
pub mod world;

pub use byteorder::Be16;
pub use identity::{EndpointId, IdentityId};

/// Address family in keys and values of the maps: IPv4.
pub const FAMILY_IPV4: u8 = 1;
/// Address family in keys and values of the maps: IPv6.
pub const FAMILY_IPV6: u8 = 2;

/// The kernel allocates an entry when it is inserted.
pub(crate) const BPF_F_NO_PREALLOC: u32 = 0x1;
/// Each CPU has an LRU list of its own.
pub(crate) const BPF_F_NO_COMMON_LRU: u32 = 0x2;
/// `BPF_F_RDONLY_PROG`: programs may read the map but not write to it.
pub(crate) const BPF_F_RDONLY_PROG: u32 = 0x80;
