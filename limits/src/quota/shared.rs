//! A quota that several tasks share, with units that return when their permit is dropped.

use std::{fmt, hash::Hash, sync::Arc};

use parking_lot::Mutex;

use super::{Holder, Quota};

/// A [`Quota`] for tasks and threads. Clones share one quota.
#[derive(Clone, Debug)]
pub struct SharedQuota<K = Holder> {
    quota: Arc<Mutex<Quota<K>>>,
}

impl<K: Copy + Eq + Hash + Ord> SharedQuota<K> {
    /// An empty quota of `limit` units.
    pub fn new(limit: usize) -> Self {
        Self {
            quota: Arc::new(Mutex::new(Quota::new(limit))),
        }
    }

    /// A permit of one unit for `holder`, or `None` if its share is used up ([`Quota`] has the
    /// rule).
    pub fn take(&self, holder: K) -> Option<Permit<K>> {
        self.take_with(holder, 0)
    }

    /// As [`Self::take`], where others hold `elsewhere` units of the limit and count them
    /// themselves.
    pub fn take_with(&self, holder: K, elsewhere: usize) -> Option<Permit<K>> {
        let mut quota = self.quota.lock();
        let limit = quota.limit();
        quota.set_limit(limit.saturating_sub(elsewhere));
        let taken = quota.take(holder, 1);
        quota.set_limit(limit);
        taken.then(|| self.permit(holder, 1))
    }

    /// A permit without units, for [`Permit::resize`].
    pub fn empty(&self, holder: K) -> Permit<K> {
        self.permit(holder, 0)
    }

    fn permit(&self, holder: K, units: usize) -> Permit<K> {
        Permit {
            quota: Arc::clone(&self.quota),
            holder,
            units,
        }
    }

    /// Units that the permits of all holders have.
    pub fn used(&self) -> usize {
        self.quota.lock().used()
    }
}

/// Units of one holder. They are given back when the permit is dropped.
pub struct Permit<K: Copy + Eq + Hash + Ord = Holder> {
    quota: Arc<Mutex<Quota<K>>>,
    holder: K,
    units: usize,
}

impl<K: Copy + Eq + Hash + Ord> Permit<K> {
    /// Number of units that the permit has now.
    pub fn units(&self) -> usize {
        self.units
    }

    /// Takes more units, or gives some back, so that there are `units`. If the rule does not
    /// allow as many, nothing changes and the result is `false`.
    #[must_use = "the permit may have fewer units than wanted"]
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

impl<K: Copy + Eq + Hash + Ord + fmt::Debug> fmt::Debug for Permit<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit")
            .field("holder", &self.holder)
            .field("units", &self.units)
            .finish_non_exhaustive()
    }
}

impl<K: Copy + Eq + Hash + Ord> Drop for Permit<K> {
    fn drop(&mut self) {
        self.quota.lock().give_back(self.holder, self.units);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_permit_is_free_again() {
        let quota = SharedQuota::new(4);
        let taken: Vec<_> = (0..2).filter_map(|_| quota.take(Holder::Host)).collect();
        assert_eq!((taken.len(), quota.used()), (2, 2));
        assert!(quota.take(Holder::Host).is_none());
        let other = quota.take(Holder::Unknown);
        assert!(other.is_some());
        drop(taken);
        assert_eq!(quota.clone().used(), 1);
        assert!(quota.take(Holder::Host).is_some());
    }

    #[test]
    fn a_permit_grows_as_far_as_its_holders_share() {
        let quota = SharedQuota::new(100);
        let (mut one, mut two) = (quota.empty(Holder::Host), quota.empty(Holder::Host));
        assert!(one.resize(30) && two.resize(20));
        assert!(!one.resize(31));
        assert_eq!((one.units(), quota.used()), (30, 50));
        assert!(two.resize(10) && one.resize(40));
        drop((one, two));
        assert_eq!(quota.used(), 0);
    }

    #[test]
    fn units_that_are_taken_elsewhere_are_not_free() {
        let quota = SharedQuota::new(8);
        let taken = quota.take_with(Holder::Host, 6);
        assert!(taken.is_some());
        assert!(quota.take_with(Holder::Host, 6).is_none());
        assert!(quota.take_with(Holder::Unknown, 6).is_some());
        assert!(quota.take_with(Holder::Unknown, 8).is_none());
        assert!(quota.take(Holder::Host).is_some());
    }
}
