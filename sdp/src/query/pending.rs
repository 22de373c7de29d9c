//! A query on its way: its arrival, and the data that is kept until its client has an answer.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use dns_policy::{
    mapping::{EndpointInstance, Realised},
    rule::Transport,
};
use dns_wire::{
    Rcode,
    edns::Edns,
    reply::{self, QueryHeader},
};
use limits::quota::Holder;
use shared_maps::IdentityId;

use crate::{query_log::Entry, stats::AnswerResult};

/// Origin, destination and time of a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Address and port of the sender.
    pub client: SocketAddr,
    /// The server for which the query was meant.
    pub server: SocketAddr,
    pub transport: Transport,
    /// Time at which the query is judged, later than its arrival if it had to wait.
    pub at: Instant,
}

/// Identities of both ends when the query arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identities {
    pub client: IdentityId,
    pub server: IdentityId,
}

/// A query that policy allows, until its client has an answer.
///
/// `Q` is the type of its question as sent: name, type, class. The question is borrowed from the
/// message while the query is judged. It is owned while the query is in flight, and dropped while
/// an answer is held.
#[derive(Debug)]
pub struct PendingQuery<Q> {
    pub from: Arrival,
    /// The client's message id, flags and EDNS.
    pub header: QueryHeader,
    pub question: Q,
    /// OPT record of the query, if it carries an option that must not be passed on.
    pub hop_by_hop: Option<Edns>,
    /// The endpoint that sent the query.
    pub endpoint: EndpointInstance,
    /// Identities of both ends. The client's identity is in the mark.
    pub identities: Identities,
    /// The address from which to send the query; `None` for the node's address. Port 0: the kernel
    /// selects one.
    pub source: Option<SocketAddr>,
    /// Duration of the policy check; zero if it was not measured.
    pub policy_check: Duration,
    /// Time at which the query was sent to the server; `None` if it was not sent.
    pub sent_at: Option<Instant>,
    /// Entry of the query log, if the log wants this query.
    pub logged: Option<Box<Entry>>,
    /// Other queries that get the same answer. Over TCP there are none.
    pub joined: Vec<Joined>,
}

/// A query that was not sent because an equal one was in flight.
#[derive(Debug)]
pub struct Joined {
    /// Address and port of the client.
    pub client: SocketAddr,
    /// The client's message id, flags and EDNS.
    pub header: QueryHeader,
    /// Entry of the query log, if the log wants this query.
    pub logged: Option<Box<Entry>>,
}

impl<Q> PendingQuery<Q> {
    /// The same query with another form of its question.
    pub fn map_question<R>(self, map: impl FnOnce(Q) -> R) -> PendingQuery<R> {
        PendingQuery {
            from: self.from,
            header: self.header,
            question: map(self.question),
            hop_by_hop: self.hop_by_hop,
            endpoint: self.endpoint,
            identities: self.identities,
            source: self.source,
            policy_check: self.policy_check,
            sent_at: self.sent_at,
            logged: self.logged,
            joined: self.joined,
        }
    }

    /// Moves the query out: it is in flight from `now` on. The data that remains in `self` serves
    /// only to send the message.
    pub(crate) fn sent<R>(&mut self, question: R, now: Instant) -> PendingQuery<R> {
        PendingQuery {
            from: self.from,
            header: self.header,
            question,
            hop_by_hop: None,
            endpoint: self.endpoint,
            identities: self.identities,
            source: self.source,
            policy_check: self.policy_check,
            sent_at: Some(now),
            logged: self.logged.take(),
            joined: std::mem::take(&mut self.joined),
        }
    }

    /// Whether one answer fits both queries.
    pub(crate) fn equals<R>(&self, other: &PendingQuery<R>) -> bool
    where
        Q: AsRef<[u8]>,
        R: AsRef<[u8]>,
    {
        self.question.as_ref() == other.question.as_ref()
            && self.from.server == other.from.server
            && self.endpoint == other.endpoint
    }

    /// The holder in whose share of queries in flight this query counts.
    pub(crate) fn holder(&self) -> Holder {
        self.endpoint.into()
    }

    /// Time since the query was sent to the server; zero if it was not sent yet.
    pub(crate) fn waited(&self, now: Instant) -> Duration {
        self.sent_at
            .map_or(Duration::ZERO, |at| now.saturating_duration_since(at))
    }

    /// The clients that get the answer, each with the header of its query.
    pub(crate) fn recipients(&self) -> impl Iterator<Item = (SocketAddr, QueryHeader)> {
        let joined = self
            .joined
            .iter()
            .map(|joined| (joined.client, joined.header));
        std::iter::once((self.from.client, self.header)).chain(joined)
    }

    /// Removes and returns the entries of the query log.
    pub(crate) fn take_entries(&mut self) -> impl Iterator<Item = Box<Entry>> {
        let joined = self.joined.iter_mut();
        let joined = joined.filter_map(|joined| joined.logged.take());
        self.logged.take().into_iter().chain(joined)
    }
}

/// An answer that waits until the agent has opened its addresses.
#[derive(Debug)]
pub(crate) struct HeldAnswer {
    pub(crate) query: PendingQuery<()>,
    /// The message for the first client.
    pub(crate) message: Vec<u8>,
    /// Time at which the server's answer arrived.
    pub(crate) since: Instant,
}

impl HeldAnswer {
    /// Applies the agent's result. If the agent rejects the mapping, SERVFAIL replaces the answer.
    pub(crate) fn settle(&mut self, realised: Realised) -> AnswerResult {
        let result = AnswerResult::of(realised);
        if result == AnswerResult::Rejected {
            let mut own = Vec::new();
            reply::to_unfit(&self.message, Rcode::ServFail, &mut own);
            self.message = own;
        }
        result
    }
}

#[cfg(test)]
impl<Q> PendingQuery<Q> {
    /// A query over UDP from an endpoint whose interface and identity have the same number as the
    /// endpoint.
    pub(crate) fn of_endpoint(endpoint: u16, question: Q, at: Instant) -> Self {
        let client = SocketAddr::from(([10, 0, 0, 1], 40_000));
        Self {
            from: Arrival {
                client,
                server: ([127, 0, 0, 1], 53).into(),
                transport: Transport::Udp,
                at,
            },
            header: QueryHeader {
                id: 1,
                flags: 0,
                edns: None,
            },
            question,
            hop_by_hop: None,
            endpoint: EndpointInstance {
                id: shared_maps::EndpointId(endpoint),
                client: client.ip(),
                ifindex: endpoint.into(),
            },
            identities: Identities {
                client: IdentityId(endpoint.into()),
                server: IdentityId(1053),
            },
            source: None,
            policy_check: Duration::ZERO,
            sent_at: None,
            logged: None,
            joined: Vec::new(),
        }
    }
}
