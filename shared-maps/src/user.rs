//! Typed access to pinned maps from user space.
//!
//! [`Map`] is a handle on one kernel map. Opening it checks map type, key size and value size. A
//! mismatch is an error that names the map and both layouts. All calls of `bpf(2)` are in `sys`.

mod attached;
mod boot;
mod error;
mod heap;
mod interface;
mod map;
mod map_of_maps;
mod record;
mod sys;
mod tables;

pub use attached::{
    Attached, Direction, HeldPin, LinkPlace, Pinned, PinnedLink, detach_pinned, has_tcx,
    may_open_pins, pin_program, program_name, tcx_chain,
};
pub use boot::{BOOT_ID, boot_id};
pub use error::MapError;
pub use heap::{limit_heap, trim_heap};
pub use interface::InterfaceNames;
pub use map::{Access, Entries, Map, MapKind, MapSpec, possible_cpus};
pub use map_of_maps::{MapOfMaps, create_queue};
pub use record::Record;
pub use sys::{boottime_ns, monotonic_ns};
pub use tables::{Globals, address_of, ipcache_key, ipcache_prefix, lxc_address, lxc_key};
