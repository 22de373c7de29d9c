//! The type of the endpoints' policy maps.

use aya_ebpf::{bindings::bpf_map_type::BPF_MAP_TYPE_LPM_TRIE, helpers::bpf_map_lookup_elem};
use shared_maps::policy::{self, PolicyKey, PolicyValue};

/// An inner map of [`crate::maps::POLICIES`].
///
/// It declares the sizes of key and value and not their types. From 5.15 to 6.1 a kernel takes a map
/// without BTF types, as the agent makes them, only if the declared inner map has none either
/// (`timer_off` in `bpf_map_meta_equal`).
#[repr(C)]
pub(crate) struct PolicyTrie {
    r#type: *const [i32; BPF_MAP_TYPE_LPM_TRIE as usize],
    key_size: *const [i32; size_of::<PolicyKey>()],
    value_size: *const [i32; size_of::<PolicyValue>()],
    max_entries: *const [i32; policy::MAX_ENTRIES as usize],
    map_flags: *const [i32; policy::FLAGS as usize],
}

impl PolicyTrie {
    /// Longest match. An entry that was found stays until the program ends: writers replace
    /// entries and never change them.
    #[inline(always)]
    pub(crate) fn get(&self, key: &PolicyKey) -> Option<&'static PolicyValue> {
        let map = core::ptr::from_ref(self).cast_mut().cast();
        // SAFETY: `self` is a map that the kernel gave for a slot of `POLICIES`. Its keys and values
        // are those of this type, which the kernel checks when a map is put into the slot.
        unsafe {
            let value = bpf_map_lookup_elem(map, core::ptr::from_ref(key).cast());
            value.cast::<PolicyValue>().as_ref()
        }
    }
}
