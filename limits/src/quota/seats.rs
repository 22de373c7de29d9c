//! A quota that several tasks share, with units that return when their seat is dropped.

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
    /// An empty quota of `limit` units.
    pub fn new(limit: usize) -> Self {
        Self {
            quota: Arc::new(Mutex::new(Quota::new(limit))),
        }
    }

    /// A seat of one unit for `holder`, or `None` if its share is used up ([`Quota`] has the
    /// rule).
    pub fn take(&self, holder: K) -> Option<Seat<K>> {
        self.take_beside(holder, 0)
    }

    /// As [`Self::take`], where others hold `elsewhere` units of the limit and count them
    /// themselves.
    pub fn take_beside(&self, holder: K, elsewhere: usize) -> Option<Seat<K>> {
        let mut quota = self.quota.lock();
        let limit = quota.limit();
        quota.set_limit(limit.saturating_sub(elsewhere));
        let taken = quota.take(holder, 1);
        quota.set_limit(limit);
        taken.then(|| self.seat(holder, 1))
    }

    /// A seat without units, for [`Seat::resize`].
    pub fn empty(&self, holder: K) -> Seat<K> {
        self.seat(holder, 0)
    }

    fn seat(&self, holder: K, units: usize) -> Seat<K> {
        Seat {
            quota: Arc::clone(&self.quota),
            holder,
            units,
        }
    }

    /// Units that the seats of all holders have.
    pub fn used(&self) -> usize {
        self.quota.lock().used()
    }
}

/// Units of one holder. They are given back when the seat is dropped.
pub struct Seat<K: Copy + Eq + Hash + Ord = Holder> {
    quota: Arc<Mutex<Quota<K>>>,
    holder: K,
    units: usize,
}

impl<K: Copy + Eq + Hash + Ord> Seat<K> {
    /// Number of units that the seat has now.
    pub fn units(&self) -> usize {
        self.units
    }

    /// Takes more units, or gives some back, so that there are `units`. If the rule does not
    /// allow as many, nothing changes and the result is `false`.
    #[must_use = "the seat may have fewer units than wanted"]
    pub fn resize(&mut self, units: usize) -> bool {
        let mut quota = self.quota.lock();
        match units.checked_sub(self.units) {
            Some(more) => {
                if !quota.take(self.holder, more) {
                    return false;
                }
            }
            None => quota.give_back(self.holder, self.units - units),
        }
        self.units = units;
        true
    }
}

impl<K: Copy + Eq + Hash + Ord + fmt::Debug> fmt::Debug for Seat<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seat")
            .field("holder", &self.holder)
            .field("units", &self.units)
            .finish_non_exhaustive()
    }
}

impl<K: Copy + Eq + Hash + Ord> Drop for Seat<K> {
    fn drop(&mut self) {
        self.quota.lock().give_back(self.holder, self.units);
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
    fn a_seat_grows_as_far_as_its_holders_share() {
        let seats = Seats::new(100);
        let (mut one, mut two) = (seats.empty(Holder::Host), seats.empty(Holder::Host));
        assert!(one.resize(30) && two.resize(20));
        assert!(!one.resize(31));
        assert_eq!((one.units(), seats.used()), (30, 50));
        assert!(two.resize(10) && one.resize(40));
        drop((one, two));
        assert_eq!(seats.used(), 0);
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
