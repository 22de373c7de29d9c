//! Answers that wait until the agent has plumbed their addresses.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use limits::quota::{Holder, Quota};

use crate::{
    arena::{Arena, Key},
    query::pending::HeldAnswer,
};

/// Maximum bytes of held answers per worker. Each endpoint has a share of it.
pub(crate) const MAX_BYTES: usize = 16 << 20;
/// Bytes that a held answer uses of its endpoint's share in addition to its message.
const OVERHEAD: usize = 512;

/// Bytes that a held answer uses of its endpoint's share.
fn units(answer: &HeldAnswer) -> usize {
    OVERHEAD + answer.message.len()
}

/// The held answers of one worker.
pub(super) struct HeldAnswers {
    answers: Arena<Option<HeldAnswer>>,
    quota: Quota,
    deadlines: VecDeque<(Instant, Key)>,
    max_delay: Duration,
}

impl HeldAnswers {
    pub(super) fn new(max_delay: Duration) -> Self {
        Self {
            answers: Arena::default(),
            quota: Quota::new(MAX_BYTES),
            deadlines: VecDeque::new(),
            max_delay,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.answers.len()
    }

    /// Whether another answer of `bytes` bytes may be held for `holder`.
    pub(super) fn has_room(&self, holder: Holder, bytes: usize) -> bool {
        self.quota.allows(holder, OVERHEAD + bytes)
    }

    /// Reserves a place for an answer that may have to be held.
    pub(super) fn reserve(&mut self) -> Key {
        self.answers.insert(None)
    }

    /// Stores an answer in a reserved place until its result arrives or its deadline is over.
    pub(super) fn hold(&mut self, key: Key, answer: HeldAnswer) {
        let deadline = answer.since + self.max_delay;
        if let Some(place) = self.answers.get_mut(key) {
            self.quota.add(answer.query.holder(), units(&answer));
            *place = Some(answer);
            self.deadlines.push_back((deadline, key));
        }
    }

    /// Removes an answer, or frees an unused place.
    pub(super) fn take(&mut self, key: Key) -> Option<HeldAnswer> {
        let answer = self.answers.remove(key).flatten()?;
        self.quota.give_back(answer.query.holder(), units(&answer));
        Some(answer)
    }

    /// Time at which the next answer must be released without a result.
    pub(super) fn next_deadline(&mut self) -> Option<Instant> {
        while let Some((deadline, key)) = self.deadlines.front() {
            if self.answers.get(*key).is_some() {
                return Some(*deadline);
            }
            self.deadlines.pop_front();
        }
        None
    }

    /// Removes any one answer, if there is one.
    pub(super) fn any(&mut self) -> Option<HeldAnswer> {
        self.next_deadline()?;
        let (_, key) = self.deadlines.pop_front()?;
        self.take(key)
    }

    /// Removes an answer that has waited long enough, if there is one.
    pub(super) fn expired(&mut self, now: Instant) -> Option<HeldAnswer> {
        let deadline = self.next_deadline()?;
        if deadline > now {
            return None;
        }
        let (_, key) = self.deadlines.pop_front()?;
        self.take(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::query::pending::PendingQuery;

    fn answer(endpoint: u16, bytes: usize, now: Instant) -> HeldAnswer {
        let mut query = PendingQuery::of_endpoint(endpoint, (), now);
        query.sent_at = Some(now);
        HeldAnswer {
            query,
            message: vec![0; bytes],
            since: now,
        }
    }

    fn hold(held: &mut HeldAnswers, endpoint: u16, bytes: usize, now: Instant) -> Option<Key> {
        let answer = answer(endpoint, bytes, now);
        held.has_room(answer.query.holder(), bytes).then(|| {
            let key = held.reserve();
            held.hold(key, answer);
            key
        })
    }

    #[test]
    fn large_answers_held_for_one_pod_leave_room_for_those_of_another() {
        let (now, delay) = (Instant::now(), Duration::from_millis(100));
        let mut held = HeldAnswers::new(delay);
        let mut most = 0;
        while hold(&mut held, 1, 4096, now).is_some() {
            most += 1;
        }
        assert_eq!(most, MAX_BYTES / 2 / (OVERHEAD + 4096));
        let other = hold(&mut held, 2, 4096, now).expect("there is room");
        assert!(held.take(other).is_some());
        while held.expired(now + delay).is_some() {}
        assert_eq!((held.len(), held.quota.used()), (0, 0));
    }
}
