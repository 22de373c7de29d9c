//! Structs in whole words. The compiler turns other copies and zeroes of more than a few bytes into
//! calls of loops over bytes.

/// Copies a struct that is aligned to words and consists of them.
///
/// # Safety
/// As for [`core::ptr::copy_nonoverlapping`] of one `T`.
#[inline(always)]
pub(crate) unsafe fn copy<T>(from: *const T, to: *mut T) {
    const { assert!(align_of::<T>() == 8 && size_of::<T>().is_multiple_of(8)) };
    // SAFETY: by the caller; the size in words is that of a `T`.
    unsafe { core::ptr::copy_nonoverlapping(from.cast::<u64>(), to.cast(), size_of::<T>() / 8) };
}

/// Zeroes a struct that is aligned to words and consists of them.
///
/// # Safety
/// `at` is valid for a write of one `T`, of which all zeroes are a value.
#[inline(always)]
pub(crate) unsafe fn zero<T>(at: *mut T) {
    const { assert!(align_of::<T>() == 8 && size_of::<T>().is_multiple_of(8)) };
    let words = at.cast::<u64>();
    for word in 0..size_of::<T>() / 8 {
        // SAFETY: by the caller. Volatile, so that the writes are not merged into a call.
        unsafe { words.add(word).write_volatile(0) };
    }
}
