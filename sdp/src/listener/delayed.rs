//! Queries that wait for a place in flight (`--dnsproxy-concurrency-processing-grace-period`), or
//! for the rules of their endpoint.

use std::{
    collections::{HashMap, VecDeque},
    ops::Range,
    time::{Duration, Instant},
};

use dns_policy::mapping::EndpointInstance;
use dns_wire::HEADER_LEN;
use foldhash::quality::RandomState;
use limits::quota::{Holder, Quota};
use shared_maps::EndpointId;

use crate::query::pending::{Arrival, PendingQuery};

/// Maximum bytes of waiting queries per worker. Each endpoint has a share of it.
pub(crate) const MAX_BYTES: usize = 4 << 20;
/// Bytes that a waiting query uses of its endpoint's share in addition to its message.
const OVERHEAD: usize = 256;
/// How often a worker without other events tries again, because another thread may have freed a
/// place.
pub(super) const RETRY: Duration = Duration::from_millis(5);

/// A query that was judged and waits for a place in flight.
#[derive(Debug)]
pub(super) struct DelayedQuery {
    message: Vec<u8>,
    /// The query. Its question is a range of `message`.
    query: PendingQuery<Range<usize>>,
    until: Instant,
}

impl DelayedQuery {
    /// Makes a delayed query from `query` and its message.
    pub(super) fn new(query: PendingQuery<&[u8]>, message: &[u8], until: Instant) -> Self {
        Self {
            message: message.to_vec(),
            query: query.map_question(|question| HEADER_LEN..HEADER_LEN + question.len()),
            until,
        }
    }

    pub(super) fn holder(&self) -> Holder {
        self.query.holder()
    }

    /// Time at which the query has waited long enough.
    pub(super) fn until(&self) -> Instant {
        self.until
    }

    /// Calls `act` with the query and its message.
    pub(super) fn act<T>(self, act: impl FnOnce(PendingQuery<&[u8]>, &[u8]) -> T) -> T {
        let message = &self.message;
        let query = self.query;
        let query = query.map_question(|question| message.get(question).unwrap_or_default());
        act(query, message)
    }

    /// Bytes that the waiting query uses of its endpoint's share: its message and a fixed overhead.
    pub(super) fn units(&self) -> usize {
        OVERHEAD + self.message.len()
    }
}

/// A query whose endpoint has no rules yet.
#[derive(Debug)]
pub(super) struct UnjudgedQuery {
    message: Vec<u8>,
    from: Arrival,
    endpoint: EndpointInstance,
    until: Instant,
}

impl UnjudgedQuery {
    pub(super) fn new(
        endpoint: EndpointInstance,
        message: &[u8],
        from: &Arrival,
        until: Instant,
    ) -> Self {
        Self {
            message: message.to_vec(),
            from: *from,
            endpoint,
            until,
        }
    }

    pub(super) fn endpoint(&self) -> EndpointId {
        self.endpoint.id
    }

    /// Time at which the query has waited long enough.
    pub(super) fn until(&self) -> Instant {
        self.until
    }

    /// The message and its arrival, with `now` as the time at which it is judged.
    pub(super) fn into_parts(self, now: Instant) -> (Vec<u8>, Arrival) {
        let from = Arrival {
            at: now,
            ..self.from
        };
        (self.message, from)
    }

    /// Bytes that the waiting query uses of its endpoint's share: its message and a fixed overhead.
    pub(super) fn units(&self) -> usize {
        OVERHEAD + self.message.len()
    }
}

/// A query that waits for a place in flight or for rules.
#[derive(Debug)]
pub(super) enum Postponed {
    ForShare(DelayedQuery),
    ForRules(UnjudgedQuery),
}

impl Postponed {
    /// Bytes that the waiting query uses of its endpoint's share.
    pub(super) fn units(&self) -> usize {
        match self {
            Self::ForShare(query) => query.units(),
            Self::ForRules(query) => query.units(),
        }
    }

    fn until(&self) -> Instant {
        match self {
            Self::ForShare(query) => query.until,
            Self::ForRules(query) => query.until,
        }
    }
}

/// All waiting queries of one UDP worker, with a line for each endpoint. Endpoints do not wait for
/// each other.
pub(super) struct Delayed {
    grace: Duration,
    rules_wait: Duration,
    quota: Quota,
    lines: HashMap<Holder, VecDeque<Postponed>, RandomState>,
}

/// A query that left its line, with the action to take.
#[derive(Debug)]
pub(super) enum Next {
    /// The query's endpoint has a place: send the query on.
    Forward(DelayedQuery),
    /// The query has waited long enough for a place.
    Expired(DelayedQuery),
    /// The query's endpoint has rules, or the query has waited long enough for them.
    Judge(UnjudgedQuery),
}

impl Delayed {
    /// A query waits for a place for at most `grace`, and for rules for at most `rules_wait`. Zero
    /// disables the waiting.
    pub(super) fn new(grace: Duration, rules_wait: Duration) -> Self {
        Self {
            grace,
            rules_wait,
            quota: Quota::new(MAX_BYTES),
            lines: HashMap::default(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.lines.values().map(VecDeque::len).sum()
    }

    /// Adds a query of an endpoint without rules. Returns `false` if there is no room for it.
    #[must_use = "a query that does not wait must be answered"]
    pub(super) fn await_rules(
        &mut self,
        endpoint: EndpointInstance,
        message: &[u8],
        from: &Arrival,
        now: Instant,
    ) -> bool {
        let query = UnjudgedQuery::new(endpoint, message, from, now + self.rules_wait);
        let holder = Holder::from(endpoint);
        if self.rules_wait.is_zero() || !self.quota.take(holder, query.units()) {
            return false;
        }
        let line = self.lines.entry(holder).or_default();
        line.push_back(Postponed::ForRules(query));
        true
    }

    /// Whether a query of `bytes` bytes may wait.
    pub(super) fn has_room(&self, holder: Holder, bytes: usize) -> bool {
        !self.grace.is_zero() && self.quota.allows(holder, OVERHEAD + bytes)
    }

    /// Adds a query for which there is room.
    pub(super) fn add(&mut self, query: PendingQuery<&[u8]>, message: &[u8], now: Instant) {
        let query = DelayedQuery::new(query, message, now + self.grace);
        self.quota.add(query.holder(), query.units());
        let line = self.lines.entry(query.holder()).or_default();
        line.push_back(Postponed::ForShare(query));
    }

    /// Returns a query to the front of its line, if [`Self::next`] returned it and there was no
    /// place. Its deadline does not change.
    pub(super) fn put_back(&mut self, query: DelayedQuery) {
        self.quota.add(query.holder(), query.units());
        let line = self.lines.entry(query.holder()).or_default();
        line.push_front(Postponed::ForShare(query));
    }

    /// Removes a query whose endpoint has a place or rules now, or that has waited long enough.
    pub(super) fn next(
        &mut self,
        now: Instant,
        has_share: impl Fn(Holder) -> bool,
        has_rules: impl Fn(EndpointId) -> bool,
    ) -> Option<Next> {
        let (holder, is_ready) = self.lines.iter().find_map(|(holder, line)| {
            let first = line.front()?;
            let is_ready = match first {
                Postponed::ForShare(_) => has_share(*holder),
                Postponed::ForRules(query) => has_rules(query.endpoint()),
            };
            (is_ready || first.until() <= now).then_some((*holder, is_ready))
        })?;
        Some(match self.take(holder)? {
            Postponed::ForRules(query) => Next::Judge(query),
            Postponed::ForShare(query) if is_ready => Next::Forward(query),
            Postponed::ForShare(query) => Next::Expired(query),
        })
    }

    /// Removes and returns one query of any endpoint that waits for a place. Drops the queries
    /// before it that wait for rules.
    pub(super) fn any(&mut self) -> Option<DelayedQuery> {
        loop {
            let holder = *self.lines.keys().next()?;
            if let Postponed::ForShare(query) = self.take(holder)? {
                return Some(query);
            }
        }
    }

    fn take(&mut self, holder: Holder) -> Option<Postponed> {
        let line = self.lines.get_mut(&holder)?;
        let first = line.pop_front();
        if line.is_empty() {
            self.lines.remove(&holder);
        }
        let query = first?;
        self.quota.give_back(holder, query.units());
        Some(query)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(5);

    fn add(delayed: &mut Delayed, id: u16, now: Instant) {
        let message = [&[0; HEADER_LEN][..], &[0, 0, 1, 0, 1]].concat();
        let question = &message[HEADER_LEN..];
        let mut query = PendingQuery::of_endpoint(7, question, now);
        query.header.id = id;
        delayed.add(query, &message, now);
    }

    fn id(query: &DelayedQuery) -> u16 {
        query.query.header.id
    }

    #[test]
    fn a_query_without_a_socket_waits_on_in_its_place_and_no_longer() {
        let now = Instant::now();
        let mut delayed = Delayed::new(GRACE, GRACE);
        add(&mut delayed, 1, now);
        add(&mut delayed, 2, now);
        let used = delayed.quota.used();
        let Some(Next::Forward(query)) = delayed.next(now, |_| true, |_| false) else {
            panic!("expected a query that has a place");
        };
        let until = query.until();
        delayed.put_back(query);
        assert_eq!((delayed.len(), delayed.quota.used()), (2, used));
        assert!(
            delayed.next(now, |_| false, |_| false).is_none(),
            "it still waits"
        );
        let Some(Next::Expired(query)) = delayed.next(now + GRACE, |_| false, |_| false) else {
            panic!("expected a query that has waited long enough");
        };
        assert_eq!((id(&query), query.until()), (1, until));
    }
}
