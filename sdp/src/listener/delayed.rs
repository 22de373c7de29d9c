//! Queries that wait for a place in flight (`--dnsproxy-concurrency-processing-grace-period`).

use std::{
    collections::{HashMap, VecDeque},
    net::SocketAddr,
    ops::Range,
    time::{Duration, Instant},
};

use foldhash::quality::RandomState;

use crate::{
    proxy::Forward,
    quota::{Holder, Quota},
    wire::HEADER_LEN,
};

/// Bytes of queries that wait, for each worker, and the endpoints' shares of them.
pub(crate) const MAX_BYTES: usize = 4 << 20;
/// Bytes that a query counts besides its own.
const OVERHEAD: usize = 256;
/// How often a place is looked for while nothing else happens: another thread may free one.
pub(super) const RETRY: Duration = Duration::from_millis(5);

/// A query that was judged and waits.
#[derive(Debug)]
pub(super) struct DelayedQuery {
    message: Vec<u8>,
    parts: Forward<'static>,
    question: Range<usize>,
    until: Instant,
}

impl DelayedQuery {
    /// `message` is the one that `query` came in.
    pub(super) fn new(query: Forward<'_>, message: &[u8], until: Instant) -> Self {
        Self {
            message: message.to_vec(),
            question: HEADER_LEN..HEADER_LEN + query.question.len(),
            parts: Forward {
                question: &[],
                ..query
            },
            until,
        }
    }

    pub(super) fn holder(&self) -> Holder {
        self.parts.endpoint.into()
    }

    /// When it has waited long enough.
    pub(super) fn until(&self) -> Instant {
        self.until
    }

    /// Calls `act` with the query and its message.
    pub(super) fn act<T>(self, act: impl FnOnce(Forward<'_>, &[u8]) -> T) -> T {
        let question = self.message.get(self.question).unwrap_or_default();
        let query = Forward {
            question,
            ..self.parts
        };
        act(query, &self.message)
    }

    /// Bytes that it counts.
    pub(super) fn units(&self) -> usize {
        OVERHEAD + self.message.len()
    }
}

/// Client and server of a query.
type Route = (SocketAddr, SocketAddr);

/// All of one UDP worker's. Those of one endpoint wait in line; endpoints do not wait for
/// each other.
pub(super) struct Delayed {
    grace: Duration,
    quota: Quota,
    lines: HashMap<Holder, VecDeque<(Route, DelayedQuery)>, RandomState>,
}

/// What is next.
#[derive(Debug)]
pub(super) enum Next {
    /// There is a place for it now.
    Place(Route, DelayedQuery),
    /// It has waited long enough.
    Expired(Route, DelayedQuery),
}

impl Delayed {
    /// `grace`: how long a query waits at most. Zero turns it off.
    pub(super) fn new(grace: Duration) -> Self {
        Self {
            grace,
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

    /// Whether a query of so many bytes may wait.
    pub(super) fn has_room(&self, holder: Holder, bytes: usize) -> bool {
        !self.grace.is_zero() && self.quota.allows(holder, OVERHEAD + bytes)
    }

    /// Adds a query for which there is room.
    pub(super) fn add(&mut self, query: Forward<'_>, message: &[u8], route: Route, now: Instant) {
        let query = DelayedQuery::new(query, message, now + self.grace);
        self.quota.add(query.holder(), query.units());
        let line = self.lines.entry(query.holder()).or_default();
        line.push_back((route, query));
    }

    /// Puts a query back that [`Self::next`] gave out and for which there was no place after all:
    /// it stays the first of its line and waits no longer than before.
    pub(super) fn put_back(&mut self, route: Route, query: DelayedQuery) {
        self.quota.add(query.holder(), query.units());
        let line = self.lines.entry(query.holder()).or_default();
        line.push_front((route, query));
    }

    /// Takes out a query whose endpoint has a place now, or that has waited long enough.
    pub(super) fn next(
        &mut self,
        now: Instant,
        has_place: impl Fn(Holder) -> bool,
    ) -> Option<Next> {
        let (holder, placed) = self.lines.iter().find_map(|(holder, line)| {
            let placed = has_place(*holder);
            let (_, first) = line.front()?;
            (placed || first.until <= now).then_some((*holder, placed))
        })?;
        let (route, query) = self.take(holder)?;
        Some(if placed {
            Next::Place(route, query)
        } else {
            Next::Expired(route, query)
        })
    }

    /// Takes out a query, whichever.
    pub(super) fn any(&mut self) -> Option<(Route, DelayedQuery)> {
        let holder = *self.lines.keys().next()?;
        self.take(holder)
    }

    fn take(&mut self, holder: Holder) -> Option<(Route, DelayedQuery)> {
        let line = self.lines.get_mut(&holder)?;
        let first = line.pop_front();
        if line.is_empty() {
            self.lines.remove(&holder);
        }
        let (route, query) = first?;
        self.quota.give_back(holder, query.units());
        Some((route, query))
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use shared_maps::{EndpointId, IdentityId};

    use super::*;
    use crate::{mapping::EndpointInstance, proxy::Identities, wire::reply::Kept};

    const GRACE: Duration = Duration::from_secs(5);

    fn add(delayed: &mut Delayed, id: u16, now: Instant) {
        let message = [&[0; HEADER_LEN][..], &[0, 0, 1, 0, 1]].concat();
        let client = IpAddr::from([10, 0, 0, 1]);
        let query = Forward {
            kept: Kept {
                id,
                flags: 0,
                edns: None,
            },
            question: &message[HEADER_LEN..],
            hop_by_hop: None,
            endpoint: EndpointInstance {
                id: EndpointId(7),
                client,
                ifindex: 3,
            },
            identities: Identities {
                client: IdentityId(1007),
                server: IdentityId(1053),
            },
            source: None,
            logged: None,
            policy_check: Duration::ZERO,
        };
        let route = ((client, 40_000).into(), ([127, 0, 0, 1], 53).into());
        delayed.add(query, &message, route, now);
    }

    fn id(query: &DelayedQuery) -> u16 {
        query.parts.kept.id
    }

    #[test]
    fn a_query_without_a_socket_waits_on_in_its_place_and_no_longer() {
        let now = Instant::now();
        let mut delayed = Delayed::new(GRACE);
        add(&mut delayed, 1, now);
        add(&mut delayed, 2, now);
        let used = delayed.quota.used();
        let Some(Next::Place(route, query)) = delayed.next(now, |_| true) else {
            panic!("a query has a place");
        };
        let until = query.until();
        delayed.put_back(route, query);
        assert_eq!((delayed.len(), delayed.quota.used()), (2, used));
        assert!(delayed.next(now, |_| false).is_none(), "it waits on");
        let Some(Next::Expired(_, query)) = delayed.next(now + GRACE, |_| false) else {
            panic!("a query has waited long enough");
        };
        assert_eq!((id(&query), query.until()), (1, until));
    }
}
