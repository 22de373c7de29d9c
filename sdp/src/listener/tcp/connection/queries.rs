//! Handles queries from the client, and sends them to the server.

use std::{sync::Arc, time::Instant};

use dns_policy::rule::Transport;
use dns_wire::{set_id, transfer::Transfer};
use limits::quota::Permit;
use rand::Rng;

use super::{super::flight::Flight, Connection};
use crate::{
    listener::{
        SocketOptions,
        delayed::{DelayedQuery, Postponed, UnjudgedQuery},
        tcp::{
            links::{Via, Wanted},
            upstream::UpstreamIdentity,
        },
    },
    proxy::{QueryDecision, RulesWait},
    query::{
        observe::Failure,
        pending::{Arrival, PendingQuery},
    },
    stats::Protocol,
};

/// A query that waits for a connection to the server. Either its pod has all the connections to
/// servers that it may have, or queries under the pod's earlier identity still use the connection
/// of this client.
pub(super) struct Unsent {
    query: DelayedQuery,
    /// The query's unit of the limit on queries in flight.
    permit: Permit,
}

impl Unsent {
    /// Bytes that the waiting query uses of its endpoint's share.
    pub(super) fn units(&self) -> usize {
        self.query.units()
    }

    /// Calls `act` with the query, its message and its permit.
    pub(super) fn act<T>(self, act: impl FnOnce(PendingQuery<&[u8]>, &[u8], Permit) -> T) -> T {
        let permit = self.permit;
        self.query.act(|query, message| act(query, message, permit))
    }
}

impl Connection {
    /// Judges the complete queries that have arrived.
    pub(super) fn take_queries(&mut self) {
        // As over UDP, queries that arrived together share one lookup.
        self.scratch.lookups.clear();
        self.retry_delayed();
        let mut message = std::mem::take(&mut self.scratch.message);
        while self.may_read() && self.client.reader.take(&mut message) {
            self.client.last_activity = self.now;
            self.turn.count(&message);
            self.query(&message);
        }
        self.scratch.message = message;
    }

    fn query(&mut self, message: &[u8]) {
        let stats = self.shared.proxy.stats();
        stats.transports.inc(Protocol::Tcp);
        let arrival = self.arrival();
        self.judge(message, &arrival, RulesWait::Allowed);
    }

    fn judge(&mut self, message: &[u8], arrival: &Arrival, rules_wait: RulesWait) {
        let proxy = Arc::clone(&self.shared.proxy);
        let (lookups, own) = (
            (&mut self.scratch.lookups, rules_wait),
            &mut self.scratch.own,
        );
        match proxy.query_of_batch(message, arrival, lookups, own) {
            QueryDecision::Ignore => {}
            QueryDecision::AwaitRules(endpoint) => {
                let until = self.now + proxy.config().rules_wait;
                let query = UnjudgedQuery::new(endpoint, message, arrival, until);
                self.delayed = Some(Postponed::ForRules(query));
            }
            QueryDecision::Reply => self.client.out.push(&self.scratch.own),
            QueryDecision::Forward(mut query) => {
                let holder = query.holder();
                let grace = proxy.config().in_flight_grace;
                match self.shared.in_flight.tcp_permit(holder) {
                    Some(permit) => self.forward(query, message, permit),
                    None if grace.is_zero() => self.fail(&mut query, Failure::Overload),
                    None => {
                        let until = self.now + grace;
                        let query = DelayedQuery::new(query, message, until);
                        self.delayed = Some(Postponed::ForShare(query));
                    }
                }
            }
        }
    }

    fn arrival(&self) -> Arrival {
        Arrival {
            client: self.client.address,
            server: self.server,
            transport: Transport::Tcp,
            at: self.now,
        }
    }

    /// Checks whether the delayed query has its permit or its rules, or has waited long enough.
    fn retry_delayed(&mut self) {
        match self.delayed.take() {
            None => {}
            Some(Postponed::ForRules(query)) => self.judge_again(query),
            Some(Postponed::ForShare(query)) => self.forward_delayed(query),
        }
        if let Some(unsent) = self.unsent.take() {
            let until = unsent.query.until();
            unsent.act(|query, message, permit| self.forward_until(query, message, permit, until));
        }
    }

    /// Judges the query if its endpoint has rules, or refuses it if it has waited long enough.
    fn judge_again(&mut self, query: UnjudgedQuery) {
        let has_rules = self.shared.proxy.has_rules(query.endpoint());
        if has_rules || self.now >= query.until() {
            let (message, arrival) = query.into_parts(self.now);
            self.judge(&message, &arrival, RulesWait::Over);
        } else {
            self.delayed = Some(Postponed::ForRules(query));
        }
    }

    /// Sends the query on if it gets a permit, or answers it if it has waited long enough.
    fn forward_delayed(&mut self, query: DelayedQuery) {
        match self.shared.in_flight.tcp_permit(query.holder()) {
            Some(permit) => query.act(|query, message| self.forward(query, message, permit)),
            None if self.now >= query.until() => {
                query.act(|mut query, _| self.fail(&mut query, Failure::Overload));
            }
            None => self.delayed = Some(Postponed::ForShare(query)),
        }
    }

    /// Answers SERVFAIL to a query.
    pub(super) fn fail<Q: AsRef<[u8]>>(&mut self, query: &mut PendingQuery<Q>, failure: Failure) {
        let (out, now) = (&mut self.client.out, self.now);
        let proxy = &self.shared.proxy;
        proxy.fail(query, (failure, now), &mut self.scratch.own, |_, answer| {
            out.push(answer)
        });
    }

    fn forward(&mut self, query: PendingQuery<&[u8]>, message: &[u8], permit: Permit) {
        let until = self.now + self.shared.proxy.config().timeout;
        self.forward_until(query, message, permit, until);
    }

    /// Sends the query on. If its pod has no connection for it, the query waits until `until`.
    fn forward_until(
        &mut self,
        mut query: PendingQuery<&[u8]>,
        message: &[u8],
        permit: Permit,
        until: Instant,
    ) {
        let transfer = Transfer::of(query.question);
        let via = match (transfer, query.source) {
            (None, None) => Via::Lent,
            _ => Via::Own,
        };
        let wanted = Wanted {
            via,
            holder: query.holder(),
            identity: query.identities.client,
            pod: self.upstream_identity(&query),
        };
        if self.links.prepare(&wanted).is_err() {
            if self.now >= until {
                self.fail(&mut query, Failure::Overload);
            } else {
                let query = DelayedQuery::new(query, message, until);
                self.unsent = Some(Unsent { query, permit });
            }
            return;
        }
        let mut id = rand::rng().random();
        while self.waiting.has(id) || self.links.has_late(id) {
            id = rand::rng().random();
        }
        let mut message = message.to_vec();
        if let Some(edns) = &query.hop_by_hop {
            edns.strip_keepalive(&mut message);
        }
        set_id(&mut message, id);
        let proxy = &self.shared.proxy;
        let question = query.question.to_vec();
        let flight = Flight {
            via,
            transfer,
            query: query.sent(question, self.now),
            message,
            deadline: self.now + proxy.config().timeout,
            resent: false,
            _permit: permit,
        };
        proxy.observer().forwarded();
        self.send(id, flight);
    }

    fn upstream_identity<Q>(&self, query: &PendingQuery<Q>) -> UpstreamIdentity {
        let is_marked = self.shared.options == SocketOptions::Transparent;
        UpstreamIdentity {
            identity: is_marked.then_some(query.identities.client),
            source: query.source,
        }
    }

    /// Sends a query on the connection that was prepared for it.
    pub(super) fn send(&mut self, id: u16, flight: Flight) {
        self.links.send(flight.via, &flight.message);
        self.waiting.add_flight(id, flight);
    }
}
