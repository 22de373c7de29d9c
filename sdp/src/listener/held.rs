//! Answers that wait for the agent to plumb their addresses.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    time::{Duration, Instant},
};

use crate::{
    arena::{Arena, Key},
    query_log::Entries,
    upstream::udp::Joined,
};

/// Answers held per worker at most.
const MAX_HELD: usize = 16_384;

/// An answer that waits.
#[derive(Debug)]
pub(super) struct HeldAnswer {
    pub(super) bytes: Vec<u8>,
    pub(super) client: SocketAddr,
    pub(super) server: SocketAddr,
    /// Who else asked the same.
    pub(super) joined: Vec<Joined>,
    /// For the query log.
    pub(super) logged: Entries,
    /// When the query came.
    pub(super) asked: Instant,
    /// When the answer came.
    pub(super) since: Instant,
}

/// All of one worker's.
pub(super) struct Held {
    answers: Arena<Option<HeldAnswer>>,
    deadlines: VecDeque<(Instant, Key)>,
    max_delay: Duration,
}

impl Held {
    pub(super) fn new(max_delay: Duration) -> Self {
        Self {
            answers: Arena::default(),
            deadlines: VecDeque::new(),
            max_delay,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.answers.len()
    }

    /// Whether another answer may be held.
    pub(super) fn has_room(&self) -> bool {
        self.answers.len() < MAX_HELD
    }

    /// A place for an answer that may have to be held.
    pub(super) fn reserve(&mut self) -> Key {
        self.answers.insert(None)
    }

    /// Fills a reserved place.
    pub(super) fn hold(&mut self, key: Key, answer: HeldAnswer) {
        let deadline = answer.since + self.max_delay;
        if let Some(place) = self.answers.get_mut(key) {
            *place = Some(answer);
            self.deadlines.push_back((deadline, key));
        }
    }

    /// Takes an answer out, or gives an unused place back.
    pub(super) fn take(&mut self, key: Key) -> Option<HeldAnswer> {
        self.answers.remove(key).flatten()
    }

    /// When the next answer is released whatever happens.
    pub(super) fn next_deadline(&mut self) -> Option<Instant> {
        while let Some((deadline, key)) = self.deadlines.front() {
            if self.answers.get(*key).is_some() {
                return Some(*deadline);
            }
            self.deadlines.pop_front();
        }
        None
    }

    /// Takes an answer out, whichever.
    pub(super) fn any(&mut self) -> Option<HeldAnswer> {
        self.next_deadline()?;
        let (_, key) = self.deadlines.pop_front()?;
        self.take(key)
    }

    /// Takes out an answer that waited long enough, if there is one.
    pub(super) fn expired(&mut self, now: Instant) -> Option<HeldAnswer> {
        let deadline = self.next_deadline()?;
        if deadline > now {
            return None;
        }
        let (_, key) = self.deadlines.pop_front()?;
        self.take(key)
    }
}
