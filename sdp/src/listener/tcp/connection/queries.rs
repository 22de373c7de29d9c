//! From the client to the server.

use std::sync::Arc;

use daemon::quota::Seat;
use dns_policy::rule::Transport;
use dns_wire::{set_id, transfer::Transfer};
use rand::Rng;

use super::{super::flight::Flight, Connection};
use crate::{
    listener::{
        SocketOptions,
        delayed::{DelayedQuery, Postponed, UnjudgedQuery},
        tcp::upstream::UpstreamIdentity,
    },
    proxy::{QueryDecision, RulesWait},
    query::{
        observe::Failure,
        pending::{Arrival, PendingQuery},
    },
    stats::Protocol,
};

impl Connection {
    /// Judges the complete queries that have arrived.
    pub(super) fn take_queries(&mut self) {
        // As over UDP, queries that arrived together share one lookup.
        self.lookups.clear();
        self.retry_delayed();
        let mut message = std::mem::take(&mut self.message);
        while self.may_read() && self.reader.take(&mut message) {
            self.last_activity = self.now;
            self.count(&message);
            self.query(&message);
        }
        self.message = message;
    }

    fn query(&mut self, message: &[u8]) {
        let stats = self.shared.proxy.stats();
        stats.transports.inc(Protocol::Tcp);
        let arrival = self.arrival();
        self.judge(message, &arrival, RulesWait::Allowed);
    }

    fn judge(&mut self, message: &[u8], arrival: &Arrival, rules_wait: RulesWait) {
        let proxy = Arc::clone(&self.shared.proxy);
        let (lookups, own) = ((&mut self.lookups, rules_wait), &mut self.own);
        match proxy.query_of_batch(message, arrival, lookups, own) {
            QueryDecision::Ignore => {}
            QueryDecision::AwaitRules(endpoint) => {
                let until = self.now + proxy.config().rules_wait;
                let query = UnjudgedQuery::new(endpoint, message, arrival, until);
                self.delayed = Some(Postponed::ForRules(query));
            }
            QueryDecision::Reply => self.out.push(&self.own),
            QueryDecision::Forward(mut query) => {
                let holder = query.holder();
                let grace = proxy.config().in_flight_grace;
                match self.shared.in_flight.tcp_seat(holder) {
                    Some(seat) => self.forward(query, message, seat),
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
            client: self.client,
            server: self.server,
            transport: Transport::Tcp,
            at: self.now,
        }
    }

    /// Checks whether the delayed query has its place or its rules now, or has waited long enough.
    fn retry_delayed(&mut self) {
        match self.delayed.take() {
            None => {}
            Some(Postponed::ForRules(query)) => self.judge_again(query),
            Some(Postponed::ForShare(query)) => self.forward_delayed(query),
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

    /// Sends the query on if there is a place, or answers it if it has waited long enough.
    fn forward_delayed(&mut self, query: DelayedQuery) {
        match self.shared.in_flight.tcp_seat(query.holder()) {
            Some(seat) => query.act(|query, message| self.forward(query, message, seat)),
            None if self.now >= query.until() => {
                query.act(|mut query, _| self.fail(&mut query, Failure::Overload));
            }
            None => self.delayed = Some(Postponed::ForShare(query)),
        }
    }

    /// Answers SERVFAIL to a query.
    pub(super) fn fail<Q: AsRef<[u8]>>(&mut self, query: &mut PendingQuery<Q>, failure: Failure) {
        let (out, now) = (&mut self.out, self.now);
        let proxy = &self.shared.proxy;
        proxy.fail(query, (failure, now), &mut self.own, |_, answer| {
            out.push(answer)
        });
    }

    fn forward(&mut self, mut query: PendingQuery<&[u8]>, message: &[u8], seat: Seat) {
        let mut id = rand::rng().random();
        while self.waiting.has(id) {
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
            transfer: Transfer::of(&question),
            query: query.sent(question, self.now),
            message,
            deadline: self.now + proxy.config().timeout,
            resent: false,
            _seat: seat,
        };
        proxy.observer().forwarded();
        self.send(id, flight);
    }

    pub(super) fn send(&mut self, id: u16, mut flight: Flight) {
        let is_marked = self.shared.options == SocketOptions::Transparent;
        let identity = UpstreamIdentity {
            identity: is_marked.then_some(flight.query.identities.client),
            source: flight.query.source,
        };
        match self.upstream.send(&flight.message, identity) {
            Ok(()) => self.waiting.add_flight(id, flight),
            Err(error) => {
                tracing::debug!(%error, "cannot connect to the server");
                self.fail(&mut flight.query, Failure::Unreachable);
            }
        }
    }
}
