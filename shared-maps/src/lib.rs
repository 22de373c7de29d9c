//! Layouts that the kernel and user space share: the one place that knows them.
//!
//! ```text
//!  bpf/ (kernel) ──► shared-maps ◄── agent (reads and writes)
//!                         ▲
//!                         └──────── sdp (reads lxc and ipcache)
//! ```
//!
//! Every key and value is `repr(C)` with explicit padding, holds neither
//! `bool` nor enum nor `Option`, and is checked for size and field offsets at
//! compile time in [`layout`]. Fields that are big-endian on the wire are of
//! type [`Be16`] or byte arrays; every other integer is in host byte order.
//!
//! The crate is `no_std` and free of dependencies unless the feature `user`
//! is on, which adds typed readers and writers of the pinned maps.
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
pub mod pin;
pub mod policy;
pub mod policystats;
pub mod quota;
pub mod redirect;
pub mod steering;
#[cfg(feature = "user")]
pub mod user;

pub use byteorder::Be16;
pub use identity::{EndpointId, IdentityId};

/// Address family as the maps spell it: [`FAMILY_IPV4`] or [`FAMILY_IPV6`].
pub const FAMILY_IPV4: u8 = 1;
/// See [`FAMILY_IPV4`].
pub const FAMILY_IPV6: u8 = 2;

/// `BPF_F_NO_PREALLOC`.
pub(crate) const BPF_F_NO_PREALLOC: u32 = 0x1;
/// `BPF_F_NO_COMMON_LRU`.
pub(crate) const BPF_F_NO_COMMON_LRU: u32 = 0x2;
/// `BPF_F_RDONLY_PROG`: programs may read the map but not write it.
pub(crate) const BPF_F_RDONLY_PROG: u32 = 0x80;
