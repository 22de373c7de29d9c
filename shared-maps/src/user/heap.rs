//! Settings of the C library's heap.
//!
//! By default each thread gets a heap of its own, and after a large buffer was freed once, buffers
//! of that size are taken from the heap and leave holes between small objects that live long. An
//! agent that has read pages of megabytes would keep twice the memory that it uses.

/// Most heaps of all threads together (`M_ARENA_MAX`).
#[cfg(target_env = "gnu")]
const ARENAS: libc::c_int = 2;
/// Larger buffers have a mapping of their own, which is returned to the system when they are freed.
#[cfg(target_env = "gnu")]
const MAPPED: libc::c_int = 128 << 10;
/// Free memory at the end of a heap that is not returned to the system.
#[cfg(target_env = "gnu")]
const KEPT: libc::c_int = 1 << 20;

/// Settings for a program that reads much and stores little. Call it before the first thread is
/// started.
#[cfg(target_env = "gnu")]
pub fn limit_heap() {
    let settings = [
        (libc::M_ARENA_MAX, ARENAS),
        (libc::M_MMAP_THRESHOLD, MAPPED),
        (libc::M_TRIM_THRESHOLD, KEPT),
    ];
    for (name, value) in settings {
        // SAFETY: mallopt has no memory-safety conditions. A refused value leaves the default.
        unsafe { libc::mallopt(name, value) };
    }
}

/// Returns free memory inside the heaps to the system. Allocations of other threads wait for some
/// milliseconds.
#[cfg(target_env = "gnu")]
pub fn trim_heap() {
    // SAFETY: malloc_trim has no memory-safety conditions.
    unsafe { libc::malloc_trim(0) };
}

/// Only the GNU C library has these settings.
#[cfg(not(target_env = "gnu"))]
pub fn limit_heap() {}

/// Only the GNU C library can do this.
#[cfg(not(target_env = "gnu"))]
pub fn trim_heap() {}
