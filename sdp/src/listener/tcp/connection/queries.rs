//! From the client to the server.

use std::{sync::Arc, time::Duration};

use daemon::quota::{Holder, Seat};
use dns_policy::rule::Transport;
use rand::Rng;

use super::{super::flight::Flight, Connection};
use crate::{
    listener::{
        SocketOptions,
        delayed::{DelayedQuery, UnjudgedQuery},
        tcp::upstream::Behalf,
    },
    notice::Failure,
    proxy::{
        Arrival, Asked, Forward, Outcome, Patience,
        stats::{Label as _, Protocol, QueryResult},
    },
    query_log::{End, Entry},
    wire::{Rcode, reply, set_id, transfer::Transfer},
};

impl Connection {
    /// Judges the queries that have come whole.
    pub(super) fn take_queries(&mut self) {
        // Queries that came together are judged by one look each, as over UDP.
        self.looked.clear();
        self.judge_again();
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
        self.judge(message, &arrival, Patience::Waits);
    }

    fn judge(&mut self, message: &[u8], arrival: &Arrival, patience: Patience) {
        let proxy = Arc::clone(&self.shared.proxy);
        let (looked, own) = ((&mut self.looked, patience), &mut self.own);
        match proxy.query_of_batch(message, arrival, looked, own) {
            Outcome::Ignore => {}
            Outcome::AwaitRules(endpoint) => {
                let until = self.now + proxy.config().rules_wait;
                self.unjudged = Some(UnjudgedQuery::new(endpoint, message, until));
            }
            Outcome::Reply => self.out.push(&self.own),
            Outcome::Forward(query) => {
                let holder = Holder::from(query.endpoint);
                let grace = proxy.config().in_flight_grace;
                match self.shared.in_flight.tcp_seat(holder) {
                    Some(seat) => self.forward(query, message, seat),
                    None if grace.is_zero() => self.shed(query),
                    None => {
                        let until = self.now + grace;
                        self.delayed = Some(DelayedQuery::new(query, message, until));
                    }
                }
            }
        }
    }

    /// Judges the query that waits for rules if there are some now, or if it has waited long enough.
    fn judge_again(&mut self) {
        let Some(query) = self.unjudged.take() else {
            return;
        };
        let has_rules = self.shared.proxy.has_rules(query.endpoint());
        if has_rules || self.now >= query.until() {
            let arrival = self.arrival();
            self.judge(&query.into_message(), &arrival, Patience::Over);
        } else {
            self.unjudged = Some(query);
        }
    }

    fn arrival(&self) -> Arrival {
        Arrival {
            client: self.client,
            server: self.server,
            transport: Transport::Tcp,
        }
    }

    /// Sends the delayed query on if there is a place now, or answers it if it has waited long
    /// enough.
    fn retry_delayed(&mut self) {
        let Some(query) = self.delayed.take() else {
            return;
        };
        match self.shared.in_flight.tcp_seat(query.holder()) {
            Some(seat) => query.act(|query, message| self.forward(query, message, seat)),
            None if self.now >= query.until() => query.act(|query, _| self.shed(query)),
            None => self.delayed = Some(query),
        }
    }

    /// Answers SERVFAIL to a query for which the endpoint has no place in flight.
    fn shed(&mut self, mut query: Forward<'_>) {
        let proxy = &self.shared.proxy;
        proxy.stats().queries.inc(QueryResult::Shed);
        let asked = Asked {
            question: query.question,
            endpoint: query.endpoint,
            client: self.client,
            server: self.server,
            transport: Transport::Tcp,
            identities: query.identities,
            policy_check: query.policy_check,
            waited: Duration::ZERO,
        };
        proxy.notice_failure(&asked, Failure::Overload);
        let code = Rcode::ServFail;
        self.log(&mut query.logged, End::own(QueryResult::Shed.text(), code));
        reply::to_kept(query.kept, query.question, code, &mut self.own);
        self.out.push(&self.own);
    }

    fn forward(&mut self, mut query: Forward<'_>, message: &[u8], seat: Seat) {
        let mut id = rand::rng().random();
        while self.waiting.has(id) {
            id = rand::rng().random();
        }
        let mut message = message.to_vec();
        if let Some(edns) = &query.hop_by_hop {
            edns.strip_keepalive(&mut message);
        }
        set_id(&mut message, id);
        let marked = self.shared.options == SocketOptions::Transparent;
        let proxy = &self.shared.proxy;
        let flight = Flight {
            kept: query.kept,
            message,
            question: query.question.to_vec(),
            endpoint: query.endpoint,
            behalf: Behalf {
                identity: marked.then_some(query.identities.client),
                source: query.source,
            },
            sent_at: self.now,
            deadline: self.now + proxy.config().timeout,
            identities: query.identities,
            policy_check: query.policy_check,
            resent: false,
            logged: query.logged.take(),
            transfer: Transfer::of(query.question),
            _seat: seat,
        };
        proxy.stats().in_flight.up();
        self.send(id, flight);
    }

    pub(super) fn send(&mut self, id: u16, flight: Flight) {
        match self.upstream.send(&flight.message, flight.behalf) {
            Ok(()) => self.waiting.add_flight(id, flight),
            Err(error) => {
                tracing::debug!(%error, "no upstream connection");
                self.fail(flight);
            }
        }
    }

    /// Answers SERVFAIL to a query whose server cannot be reached.
    pub(super) fn fail(&mut self, mut flight: Flight) {
        let asked = flight.asked((self.client, self.server), self.now);
        self.shared
            .proxy
            .notice_failure(&asked, Failure::Unreachable);
        let result = QueryResult::UpstreamError.text();
        self.log(&mut flight.logged, End::own(result, Rcode::ServFail));
        let stats = self.shared.proxy.stats();
        stats.in_flight.down();
        stats.queries.inc(QueryResult::UpstreamError);
        reply::unreachable(flight.kept, &flight.question, &mut self.own);
        self.out.push(&self.own);
    }

    /// Ends the query log's entry of a query, if it has one.
    pub(super) fn log(&self, entry: &mut Option<Box<Entry>>, end: End) {
        if let Some(entry) = entry.take() {
            self.shared.proxy.log(entry, end, self.now);
        }
    }
}
