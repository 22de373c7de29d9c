//! A quota that several tasks share, with units that give themselves back.

use std::{fmt, hash::Hash, sync::Arc};

use parking_lot::Mutex;

use super::{Holder, Quota};

/// A [`Quota`] for tasks and threads. Clones share one quota.
#[derive(Debug)]
pub struct Seats<K = Holder> {
    quota: Arc<Mutex<Quota<K>>>,
}

impl<K> Clone for Seats<K> {
    fn clone(&self) -> Self {
        Self {
            quota: Arc::clone(&self.quota),
        }
    }
}

impl<K: Copy + Eq + Hash + Ord> Seats<K> {
    /// `limit` seats, all free.
    pub fn new(limit: usize) -> Self {
        Self {
            quota: Arc::new(Mutex::new(Quota::new(limit))),
        }
    }

    /// A seat for `holder`, or `None` if its share is used up ([`Quota`] has the rule).
    pub fn take(&self, holder: K) -> Option<Seat<K>> {
        self.take_beside(holder, 0)
    }

    /// As [`Self::take`], where `elsewhere` of the seats are taken by others who count for
    /// themselves.
    pub fn take_beside(&self, holder: K, elsewhere: usize) -> Option<Seat<K>> {
        let mut quota = self.quota.lock();
        let limit = quota.limit();
        quota.set_limit(limit.saturating_sub(elsewhere));
        let taken = quota.take(holder, 1);
        quota.set_limit(limit);
        taken.then(|| Seat {
            quota: Arc::clone(&self.quota),
            holder,
        })
    }

    /// Seats taken.
    pub fn used(&self) -> usize {
        self.quota.lock().used()
    }
}

/// One seat. Dropping it gives it back.
pub struct Seat<K: Copy + Eq + Hash + Ord = Holder> {
    quota: Arc<Mutex<Quota<K>>>,
    holder: K,
}

impl<K: Copy + Eq + Hash + Ord + fmt::Debug> fmt::Debug for Seat<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Seat").field(&self.holder).finish()
    }
}

impl<K: Copy + Eq + Hash + Ord> Drop for Seat<K> {
    fn drop(&mut self) {
        self.quota.lock().give_back(self.holder, 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_seat_is_free_again() {
        let seats = Seats::new(4);
        let taken: Vec<_> = (0..2).filter_map(|_| seats.take(Holder::Host)).collect();
        assert_eq!((taken.len(), seats.used()), (2, 2));
        assert!(seats.take(Holder::Host).is_none());
        let other = seats.take(Holder::Unknown);
        assert!(other.is_some());
        drop(taken);
        assert_eq!(seats.clone().used(), 1);
        assert!(seats.take(Holder::Host).is_some());
    }

    #[test]
    fn seats_that_are_taken_elsewhere_are_not_free() {
        let seats = Seats::new(8);
        let taken = seats.take_beside(Holder::Host, 6);
        assert!(taken.is_some());
        assert!(seats.take_beside(Holder::Host, 6).is_none());
        assert!(seats.take_beside(Holder::Unknown, 6).is_some());
        assert!(seats.take_beside(Holder::Unknown, 8).is_none());
        assert!(seats.take(Holder::Host).is_some());
    }
}
