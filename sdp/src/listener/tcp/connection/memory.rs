//! A connection's part of its endpoint's share of memory.

use limits::quota::Permit;

use crate::stats::Level;

/// Step in bytes in which the part grows and shrinks.
const STEP: usize = 16 * 1024;

/// Memory of one connection. Dropping it frees the memory, even if the connection's task is
/// cancelled.
pub(super) struct Memory {
    share: Permit,
    /// Bytes of all connections together.
    total: Level,
}

impl Memory {
    pub(super) fn new(share: Permit, total: Level) -> Self {
        Self { share, total }
    }

    /// Counts `bytes` as in use. Returns `false`, and keeps the earlier count, if the share does
    /// not allow that many.
    #[must_use = "the connection may use more than its share allows"]
    pub(super) fn charge(&mut self, bytes: usize) -> bool {
        let (had, has) = (self.share.units(), bytes.next_multiple_of(STEP));
        if has != had {
            if !self.share.resize(has) {
                return false;
            }
            self.total.change(had, has);
        }
        true
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.total.change(self.share.units(), 0);
    }
}

#[cfg(test)]
mod tests {
    use limits::quota::{Holder, SharedQuota};

    use super::*;

    #[test]
    fn dropped_memory_is_free() {
        let (quota, total) = (SharedQuota::new(8 * STEP), Level::default());
        let mut memory = Memory::new(quota.empty(Holder::Host), total.clone());
        assert!(memory.charge(STEP + 1));
        assert!(!memory.charge(8 * STEP));
        assert_eq!((quota.used(), total.get()), (2 * STEP, 2 * STEP as u64));
        drop(memory);
        assert_eq!((quota.used(), total.get()), (0, 0));
    }
}
