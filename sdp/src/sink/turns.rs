//! Queues of several holders that take turns: however much one holder has queued, another
//! one's next item is sent as soon as each of the others has had one turn.

use std::collections::{HashMap, HashSet, VecDeque};

use foldhash::quality::RandomState;
use limits::quota::Holder;

use crate::mapping::pairs::Key;

/// Items by holder, in the order of arrival for each.
pub(super) struct Turns<T> {
    queues: HashMap<Holder, VecDeque<T>, RandomState>,
    /// Holders with items, the next one first.
    order: VecDeque<Holder>,
    len: usize,
}

impl<T> Default for Turns<T> {
    fn default() -> Self {
        Self {
            queues: HashMap::default(),
            order: VecDeque::new(),
            len: 0,
        }
    }
}

impl<T> Turns<T> {
    pub(super) fn push(&mut self, holder: Holder, item: T) {
        let queue = self.queues.entry(holder).or_default();
        if queue.is_empty() {
            self.order.push_back(holder);
        }
        queue.push_back(item);
        self.len += 1;
    }

    /// The next item, of a holder that may have one sent.
    pub(super) fn pop(&mut self, may: impl Fn(Holder) -> bool) -> Option<(Holder, T)> {
        let at = self.order.iter().position(|holder| may(*holder))?;
        // Holders that may not take a turn keep their place behind the one that did.
        self.order.rotate_left(at);
        let holder = self.order.pop_front()?;
        let item = self.take_first(holder)?;
        if self.queues.contains_key(&holder) {
            self.order.push_back(holder);
        }
        Some((holder, item))
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

    /// Takes out items from the front of each queue.
    pub(super) fn take_while(&mut self, is_over: impl Fn(&T) -> bool) -> Vec<(Holder, T)> {
        let mut taken = Vec::new();
        for holder in std::mem::take(&mut self.order) {
            while let Some(first) = self.queues.get(&holder).and_then(VecDeque::front)
                && is_over(first)
                && let Some(item) = self.take_first(holder)
            {
                taken.push((holder, item));
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

/// Names to send, each once: one name may come to be several mappings.
#[derive(Default)]
pub(super) struct Names {
    turns: Turns<Key>,
    queued: HashSet<Key, RandomState>,
}

impl Names {
    /// Whether it was not queued already.
    pub(super) fn push(&mut self, key: Key) -> bool {
        let is_new = self.queued.insert(key.clone());
        if is_new {
            self.turns.push(key.asked.endpoint.into(), key);
        }
        is_new
    }

    pub(super) fn pop(&mut self) -> Option<Key> {
        let (_, key) = self.turns.pop(|_| true)?;
        self.queued.remove(&key);
        Some(key)
    }

    pub(super) fn contains(&self, key: &Key) -> bool {
        self.queued.contains(key)
    }

    pub(super) fn len(&self) -> usize {
        self.turns.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
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
        let mut turns = Turns::default();
        for n in 0..3 {
            turns.push(pod(1), n);
        }
        turns.push(pod(2), 10);
        let order: Vec<_> = std::iter::from_fn(|| turns.pop(|_| true)).collect();
        let expected = [(pod(1), 0), (pod(2), 10), (pod(1), 1), (pod(1), 2)];
        assert_eq!(order, expected);
        assert!(turns.is_empty() && turns.order.is_empty());
    }

    #[test]
    fn a_holder_without_permission_waits_and_loses_nothing() {
        let mut turns = Turns::default();
        (0..2).for_each(|n| turns.push(pod(1), n));
        turns.push(pod(2), 10);
        assert_eq!(turns.pop(|holder| holder != pod(1)), Some((pod(2), 10)));
        assert_eq!(turns.pop(|holder| holder != pod(1)), None);
        assert_eq!(turns.len(), 2);
        assert_eq!(turns.take_while(|n| *n < 1), [(pod(1), 0)]);
        assert_eq!(turns.pop(|_| true), Some((pod(1), 1)));
    }
}
