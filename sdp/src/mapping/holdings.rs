//! The entries of a bounded table by holder: finds the entries that end next, and the entries to
//! remove when the table is full.
//!
//! An extended entry keeps its place in the order. When that place comes first, the new end is
//! looked up. So neither an answer nor an eviction walks the table.

use std::{
    cmp::Ordering,
    collections::{BinaryHeap, HashMap},
};

use dns_policy::boot_time::BootTime;
use foldhash::quality::RandomState;
use limits::quota::{Holder, Quota};

/// Maximum number of outdated places in the order of one holder, in addition to twice its entries.
const OUTDATED: usize = 64;

/// Distinguishes an entry from an earlier one with the same key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Serial(u64);

/// The keys of a table's entries, by holder and by end. `K` is the key of an entry in the table.
#[derive(Debug)]
pub(super) struct Holdings<K> {
    entries: Quota,
    order: HashMap<Holder, BinaryHeap<Expiry<K>>, RandomState>,
    next_serial: u64,
}

#[derive(Debug)]
struct Expiry<K> {
    at: BootTime,
    serial: Serial,
    key: K,
}

impl<K: Clone> Holdings<K> {
    /// An empty index for a table with at most `limit` entries.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            entries: Quota::new(limit),
            order: HashMap::default(),
            next_serial: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.used()
    }

    /// Number of entries above the limit.
    pub(super) fn excess(&self) -> usize {
        self.len().saturating_sub(self.entries.limit())
    }

    /// Adds a new entry that ends at `at` or later.
    pub(super) fn enter(&mut self, holder: Holder, at: BootTime, key: K) -> Serial {
        let serial = Serial(self.next_serial);
        self.next_serial += 1;
        self.entries.add(holder, 1);
        let order = self.order.entry(holder).or_default();
        order.push(Expiry { at, serial, key });
        serial
    }

    /// Drops outdated places if there are too many. `end_of` returns the end of an entry, or `None`
    /// if the entry is gone; so it does in the other methods.
    pub(super) fn tidy(&mut self, holder: Holder, end_of: impl Fn(&K, Serial) -> Option<BootTime>) {
        let most = 2 * self.entries.held_by(holder) + OUTDATED;
        if let Some(order) = self.order.get_mut(&holder)
            && order.len() > most
        {
            order.retain(|turn| end_of(&turn.key, turn.serial).is_some());
        }
    }

    /// Notes that an entry of `holder` left the table.
    pub(super) fn leave(&mut self, holder: Holder) {
        self.entries.give_back(holder, 1);
        if self.entries.held_by(holder) == 0 {
            self.order.remove(&holder);
        }
    }

    /// Notes that all entries left the table.
    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.order.clear();
    }

    /// Entries that ended. The caller removes each from the table and calls [`Self::leave`].
    pub(super) fn ended(
        &mut self,
        now: BootTime,
        end_of: impl Fn(&K, Serial) -> Option<BootTime>,
    ) -> Vec<K> {
        let mut found = Vec::new();
        for order in self.order.values_mut() {
            while order.peek().is_some_and(|turn| turn.at <= now)
                && let Some(mut turn) = order.pop()
            {
                match end_of(&turn.key, turn.serial) {
                    Some(end) if end > now => {
                        turn.at = end;
                        order.push(turn);
                    }
                    Some(_) => found.push(turn.key),
                    None => {}
                }
            }
        }
        found
    }

    /// Up to `most` entries of the holder with the most entries: the entries that end soonest. The
    /// caller removes each from the table and calls [`Self::leave`].
    pub(super) fn of_largest(
        &mut self,
        most: usize,
        end_of: impl Fn(&K, Serial) -> Option<BootTime>,
    ) -> Vec<K> {
        let mut found = Vec::new();
        let Some((holder, _)) = self.entries.largest() else {
            return found;
        };
        let Some(order) = self.order.get_mut(&holder) else {
            return found;
        };
        while found.len() < most
            && let Some(mut turn) = order.pop()
        {
            match end_of(&turn.key, turn.serial) {
                Some(end) if end > turn.at => {
                    turn.at = end;
                    order.push(turn);
                }
                Some(_) => found.push(turn.key),
                None => {}
            }
        }
        found
    }
}

/// An entry that ends sooner is greater, because a [`BinaryHeap`] returns its greatest entry first.
impl<K> Ord for Expiry<K> {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.serial).cmp(&(self.at, self.serial))
    }
}

impl<K> PartialOrd for Expiry<K> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<K> PartialEq for Expiry<K> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<K> Eq for Expiry<K> {}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use shared_maps::EndpointId;

    use super::*;

    const POD: Holder = Holder::Endpoint {
        id: EndpointId(1),
        ifindex: 9,
    };

    #[test]
    fn added_and_removed_entries_leave_no_room_in_use() {
        let table = RefCell::new(HashMap::<u64, Serial>::new());
        let end_of = |key: &u64, serial| {
            let found = table.borrow().get(key).copied();
            (found == Some(serial)).then_some(BootTime::from_nanos(100))
        };
        let mut holdings = Holdings::new(1000);
        for key in 0..10_000_u64 {
            let serial = holdings.enter(POD, BootTime::from_nanos(100), key);
            table.borrow_mut().insert(key, serial);
            if key >= 10 {
                table.borrow_mut().remove(&(key - 10));
                holdings.leave(POD);
            }
            holdings.tidy(POD, end_of);
            assert!(holdings.order[&POD].len() <= 2 * 10 + OUTDATED);
        }
        assert_eq!(holdings.len(), 10);
        let mut left = holdings.ended(BootTime::from_nanos(100), end_of);
        left.sort_unstable();
        assert_eq!(left, (9_990..10_000).collect::<Vec<_>>());
        left.iter().for_each(|_| holdings.leave(POD));
        assert!(holdings.order.is_empty());
    }

    #[test]
    fn an_extended_entry_is_removed_after_one_that_was_not_extended() {
        let mut holdings = Holdings::new(10);
        let first = holdings.enter(POD, BootTime::from_nanos(100), 'a');
        holdings.enter(POD, BootTime::from_nanos(200), 'b');
        let end_of = |_: &char, serial| {
            let end = if serial == first { 300 } else { 200 };
            Some(BootTime::from_nanos(end))
        };
        assert!(holdings.ended(BootTime::from_nanos(150), end_of).is_empty());
        assert_eq!(holdings.of_largest(1, end_of), ['b']);
        assert_eq!(holdings.of_largest(1, end_of), ['a']);
    }
}
