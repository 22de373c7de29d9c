//! Queues of several holders that take turns: however many items one holder has queued, the next
//! item of another holder is sent after at most one item of every other holder.

use std::collections::{HashMap, HashSet, VecDeque};

use foldhash::quality::RandomState;
use limits::quota::{self, Holder};

use crate::mapping::pairs::Key;

/// Items by holder. The items of each holder are in the order of arrival.
pub(super) struct Turns<T> {
    queues: HashMap<Holder, VecDeque<T>, RandomState>,
    /// Holders with items. The next one is first.
    order: VecDeque<Holder>,
    len: usize,
    limit: usize,
}

impl<T> Turns<T> {
    /// A queue of at most `limit` items, of which each holder has a share.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            queues: HashMap::default(),
            order: VecDeque::new(),
            len: 0,
            limit,
        }
    }

    /// Adds an item. Returns the item if the share of `holder` is used up.
    pub(super) fn push(&mut self, holder: Holder, item: T) -> Result<(), T> {
        let held = self.queues.get(&holder).map_or(0, VecDeque::len);
        if !quota::may_take(held, self.limit - self.len, self.limit) {
            return Err(item);
        }
        if held == 0 {
            self.order.push_back(holder);
        }
        self.queues.entry(holder).or_default().push_back(item);
        self.len += 1;
        Ok(())
    }

    /// The next item, of the first holder for which `may` is true.
    pub(super) fn pop(&mut self, may: impl Fn(Holder) -> bool) -> Option<T> {
        let at = self.order.iter().position(|holder| may(*holder))?;
        // Holders that were skipped go to the back, and the holder that is served goes behind them.
        self.order.rotate_left(at);
        let holder = self.order.pop_front()?;
        let item = self.take_first(holder)?;
        if self.queues.contains_key(&holder) {
            self.order.push_back(holder);
        }
        Some(item)
    }

    fn take_first(&mut self, holder: Holder) -> Option<T> {
        let queue = self.queues.get_mut(&holder)?;
        let item = queue.pop_front()?;
        self.len -= 1;
        if queue.is_empty() {
            self.queues.remove(&holder);
        }
        Some(item)
    }

    /// Removes items from the front of each queue while `is_over` accepts them.
    pub(super) fn take_while(&mut self, is_over: impl Fn(&T) -> bool) -> Vec<T> {
        let mut taken = Vec::new();
        for holder in std::mem::take(&mut self.order) {
            while let Some(first) = self.queues.get(&holder).and_then(VecDeque::front)
                && is_over(first)
                && let Some(item) = self.take_first(holder)
            {
                taken.push(item);
            }
            if self.queues.contains_key(&holder) {
                self.order.push_back(holder);
            }
        }
        taken
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.queues.values().flatten()
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Names whose mappings are to be sent. A name is queued at most once, even if it has several
/// mappings.
pub(super) struct Names {
    turns: Turns<Key>,
    queued: HashSet<Key, RandomState>,
}

impl Names {
    /// A queue of at most `limit` names, of which each endpoint has a share.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            turns: Turns::new(limit),
            queued: HashSet::default(),
        }
    }

    /// Queues a name. Returns `false` if it is already in the queue, or if there is no room.
    pub(super) fn push(&mut self, key: Key) -> bool {
        let holder = key.asked.endpoint.into();
        !self.queued.contains(&key)
            && self.turns.push(holder, key.clone()).is_ok()
            && self.queued.insert(key)
    }

    pub(super) fn pop(&mut self) -> Option<Key> {
        let key = self.turns.pop(|_| true)?;
        self.queued.remove(&key);
        Some(key)
    }

    pub(super) fn len(&self) -> usize {
        self.turns.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    pub(super) fn clear(&mut self) {
        *self = Self::new(self.turns.limit);
    }
}

#[cfg(test)]
mod tests {
    use shared_maps::EndpointId;

    use super::*;

    fn pod(id: u16) -> Holder {
        Holder::Endpoint {
            id: EndpointId(id),
            ifindex: 1,
        }
    }

    #[test]
    fn holders_take_turns_and_each_keeps_its_order() {
        let mut turns = Turns::new(100);
        for n in 0..3 {
            turns.push(pod(1), n).unwrap();
        }
        turns.push(pod(2), 10).unwrap();
        let order: Vec<_> = std::iter::from_fn(|| turns.pop(|_| true)).collect();
        assert_eq!(order, [0, 10, 1, 2]);
        assert!(turns.is_empty() && turns.order.is_empty());
    }

    #[test]
    fn a_holder_without_permission_waits_and_loses_nothing() {
        let mut turns = Turns::new(100);
        (0..2).for_each(|n| turns.push(pod(1), n).unwrap());
        turns.push(pod(2), 10).unwrap();
        assert_eq!(turns.pop(|holder| holder != pod(1)), Some(10));
        assert_eq!(turns.pop(|holder| holder != pod(1)), None);
        assert_eq!(turns.len(), 2);
        assert_eq!(turns.take_while(|n| *n < 1), [0]);
        assert_eq!(turns.pop(|_| true), Some(1));
    }
}
