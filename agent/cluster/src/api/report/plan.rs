//! Which condition or Event is written next, and when. No input or output.
//!
//! Each refusal is written once, and its Event again every [`REPEAT`]. Writes are spread over time,
//! and a kind of writes that fails is tried again after longer and longer pauses.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use agent_core::policy::egress_firewall;

use crate::refusals::Refusals;

/// Time between two Events of one refusal: shorter than the hour that Events live.
const REPEAT: Duration = Duration::from_mins(30);
/// Shortest time between two writes about one object.
const PER_OBJECT: Duration = Duration::from_secs(10);
/// First and longest time until a failed kind of writes is tried again.
const RETRY: (Duration, Duration) = (Duration::from_secs(10), Duration::from_mins(10));
/// Conditions: how many may be written at once, and the time that each further one takes.
const CONDITIONS: (u32, Duration) = (10, Duration::from_millis(500));
/// Events: how many may be written at once, and the time that each further one takes.
const EVENTS: (u32, Duration) = (10, Duration::from_secs(6));

/// One write that is due.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Write {
    pub(super) key: String,
    /// Why the object is refused; `None` if it is accepted again.
    pub(super) message: Option<Arc<str>>,
    pub(super) what: What,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// The status of a policy.
    Condition,
    /// An Event, and how often the refusal was reported with it.
    Event(u32),
}

/// Result of a write, as reported to [`Plan::done`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The object has what was to be written, or does not need it.
    Done,
    /// Another writer was faster; the write is soon tried again.
    Conflict,
    /// The server refuses the write or does not answer.
    Failed,
}

/// What the task has to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Write(Write),
    /// Wait until this time: a write is due then.
    At(Instant),
    /// Nothing until the refusals change.
    Nothing,
}

/// Writes of one agent while it holds the Lease.
#[derive(Debug)]
pub(super) struct Plan {
    refusals: Arc<Refusals>,
    written: BTreeMap<(String, Channel), Written>,
    conditions: Pace,
    events: Pace,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Channel {
    Condition,
    Event,
}

/// The last write about an object.
#[derive(Debug)]
struct Written {
    /// Why the object is refused; `None` if the write reported that the object is accepted.
    message: Option<Arc<str>>,
    is_done: bool,
    at: Instant,
    count: u32,
}

impl Plan {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            refusals: Arc::default(),
            written: BTreeMap::new(),
            conditions: Pace::new(CONDITIONS, now),
            events: Pace::new(EVENTS, now),
        }
    }

    /// Replaces the refusals. Writes for documents that are neither refused nor in
    /// [`Refusals::marked`] any more are forgotten.
    pub(super) fn set(&mut self, refusals: Arc<Refusals>) {
        self.written.retain(|(key, _), _| {
            refusals.refused.contains_key(key) || refusals.marked.contains(key)
        });
        self.refusals = refusals;
    }

    /// Forgets the writes: another agent may have written meanwhile.
    pub(super) fn forget(&mut self) {
        self.written.clear();
    }

    /// The next write. [`Self::done`] must follow.
    pub(super) fn next(&self, now: Instant) -> Next {
        let mut due_at: Option<Instant> = None;
        // Choose the write that was tried longest ago, so that a write that always fails holds up no other.
        let mut chosen: Option<(Option<Instant>, Write)> = None;
        for (due, tried, write) in self.wanted() {
            if due > now {
                due_at = Some(due_at.map_or(due, |first| first.min(due)));
            } else if chosen.as_ref().is_none_or(|(oldest, _)| tried < *oldest) {
                chosen = Some((tried, write));
            }
        }
        match (chosen, due_at) {
            (Some((_, write)), _) => Next::Write(write),
            (None, Some(due)) => Next::At(due),
            (None, None) => Next::Nothing,
        }
    }

    /// Every write that is wanted, when it may be done, and when it was tried last.
    fn wanted(&self) -> impl Iterator<Item = (Instant, Option<Instant>, Write)> {
        let refused = self.refusals.refused.iter();
        let refused = refused.map(|(key, message)| (key, Some(message.clone())));
        let marked = self.refusals.marked.iter();
        let accepted = marked.filter(|key| !self.refusals.refused.contains_key(*key));
        let all = refused.chain(accepted.map(|key| (key, None)));
        all.flat_map(|(key, message)| {
            let event = message.clone().and_then(|message| self.event(key, message));
            [self.condition(key, message), event].into_iter().flatten()
        })
    }

    fn condition(
        &self,
        key: &str,
        message: Option<Arc<str>>,
    ) -> Option<(Instant, Option<Instant>, Write)> {
        if !key.split('/').next().is_some_and(has_condition) {
            return None;
        }
        let before = self.written.get(&(key.to_owned(), Channel::Condition));
        if before.is_some_and(|before| before.is_done && before.message == message) {
            return None;
        }
        let free = self.conditions.free();
        let due = before.map_or(free, |before| free.max(before.at + PER_OBJECT));
        let write = Write {
            key: key.to_owned(),
            message,
            what: What::Condition,
        };
        Some((due, before.map(|before| before.at), write))
    }

    fn event(&self, key: &str, message: Arc<str>) -> Option<(Instant, Option<Instant>, Write)> {
        let before = self.written.get(&(key.to_owned(), Channel::Event));
        let free = self.events.free();
        let (due, count) = match before {
            None => (free, 1),
            Some(before) if before.is_done && before.message.as_ref() == Some(&message) => {
                (free.max(before.at + REPEAT), before.count.saturating_add(1))
            }
            Some(before) => (free.max(before.at + PER_OBJECT), 1),
        };
        let write = Write {
            key: key.to_owned(),
            message: Some(message),
            what: What::Event(count),
        };
        Some((due, before.map(|before| before.at), write))
    }

    /// Records the result of a write, which decides when the next one may follow.
    pub(super) fn done(&mut self, write: Write, outcome: Outcome, now: Instant) {
        let (channel, pace, count) = match write.what {
            What::Condition => (Channel::Condition, &mut self.conditions, 1),
            What::Event(count) => (Channel::Event, &mut self.events, count),
        };
        pace.used(outcome, now);
        let written = Written {
            message: write.message,
            is_done: outcome == Outcome::Done,
            at: now,
            count,
        };
        self.written.insert((write.key, channel), written);
    }
}

/// Whether objects of a kind have a status for the report that they are refused or accepted.
pub(super) fn has_condition(kind: &str) -> bool {
    matches!(
        kind,
        "CiliumNetworkPolicy" | "CiliumClusterwideNetworkPolicy" | egress_firewall::KIND
    )
}

/// Spreads writes of one kind over time.
#[derive(Debug)]
struct Pace {
    burst: u32,
    each: Duration,
    /// Time at which the writes so far would end if each took `each`. It is in the future by `burst` writes
    /// at most.
    spent: Instant,
    /// No write before this time, after a write that failed.
    blocked: Instant,
    retry: Duration,
}

impl Pace {
    fn new((burst, each): (u32, Duration), now: Instant) -> Self {
        Self {
            burst,
            each,
            spent: now,
            blocked: now,
            retry: RETRY.0,
        }
    }

    /// The time from which the next write may be done.
    fn free(&self) -> Instant {
        let ahead = self.each * self.burst.saturating_sub(1);
        let by_rate = self.spent.checked_sub(ahead).unwrap_or(self.spent);
        by_rate.max(self.blocked)
    }

    fn used(&mut self, outcome: Outcome, now: Instant) {
        self.spent = self.spent.max(now) + self.each;
        match outcome {
            Outcome::Done | Outcome::Conflict => self.retry = RETRY.0,
            Outcome::Failed => {
                self.blocked = now + self.retry;
                self.retry = (self.retry * 2).min(RETRY.1);
            }
        }
    }
}

#[cfg(test)]
mod tests;
