//! Receives the queries of clients and sends them to servers.

use std::sync::Arc;

use dns_wire::set_id;

use super::{BATCH, Next, ROUNDS, Worker};
use crate::{
    listener::{delayed::DelayedQuery, send_all::send_all},
    proxy::{QueryDecision, RulesWait},
    query::{
        observe::Failure,
        pending::{Arrival, PendingQuery},
    },
    socket::sys::Datagram,
    upstream::udp::{FlightRef, RegisterError, Registration},
};

/// Maximum number of delayed queries that are tried again in one turn. New rules can free thousands
/// at once, and the worker's other endpoints must not wait for all of them.
const RETRIES: usize = 256;

impl Worker {
    /// Receives queries from a listener and sends them on.
    pub(super) fn queries(&mut self, listener: usize) {
        for _ in 0..ROUNDS {
            let Some(received) = self.clients.receive(listener, self.proxy.stats()) else {
                return;
            };
            if let Some(leaving) = &mut self.leaving {
                leaving.packet(self.now);
            }
            self.taken += received;
            self.buffers.lookups.clear();
            self.upstream.next_batch(self.in_flight.udp_limit());
            let mut registered = std::mem::take(&mut self.buffers.registered);
            registered.extend((0..received).filter_map(|at| Some((self.query(at)?, at))));
            // Datagrams of one size are sent as one message.
            let queries = &self.clients.queries;
            registered.sort_unstable_by_key(|(registered, at)| {
                (registered.socket, queries.bytes(*at).len(), *at)
            });
            for group in registered.chunk_by(|(a, _), (b, _)| a.socket == b.socket) {
                self.forward(group);
            }
            registered.clear();
            self.buffers.registered = registered;
            if received < BATCH {
                return;
            }
        }
    }

    /// Judges one query. Returns its flight if it is to be sent from the batch.
    fn query(&mut self, at: usize) -> Option<FlightRef> {
        let arrival = self.clients.arrival(at, self.now, self.proxy.stats())?;
        let message = self.clients.queries.bytes(at);
        let batch = (&mut self.buffers.lookups, RulesWait::Allowed);
        match self
            .proxy
            .query_of_batch(message, &arrival, batch, &mut self.buffers.own)
        {
            QueryDecision::AwaitRules(endpoint) => {
                if !self
                    .delayed
                    .await_rules(endpoint, message, &arrival, self.now)
                {
                    let message = message.to_vec();
                    self.judge_at_last(&message, &arrival);
                }
                None
            }
            QueryDecision::Ignore => None,
            QueryDecision::Reply => {
                self.send_own(arrival.server, arrival.client);
                None
            }
            QueryDecision::Forward(mut query) => {
                let registered = self
                    .upstream
                    .register(&mut query, message, self.now, &self.epoll);
                let registered = match registered {
                    Ok(Registration::New(registered)) => registered,
                    Ok(Registration::Joined) => {
                        self.proxy.observer().joined();
                        return None;
                    }
                    Err(RegisterError::Full)
                        if self.delayed.has_room(query.holder(), message.len()) =>
                    {
                        self.delayed.add(query, message, self.now);
                        return None;
                    }
                    Err(error) => {
                        let mut query = query.map_question(<[u8]>::to_vec);
                        self.fail(&mut query, failure_of(&error));
                        return None;
                    }
                };
                self.proxy.observer().forwarded();
                if let Some(edns) = query.hop_by_hop {
                    self.buffers.copy_query(message, Some(&edns), registered.id);
                    self.forward_own(registered);
                    return None;
                }
                set_id(self.clients.queries.bytes_mut(at), registered.id);
                Some(registered)
            }
        }
    }

    /// Judges a query that no longer waits for the rules of its endpoint.
    fn judge_at_last(&mut self, message: &[u8], arrival: &Arrival) {
        let proxy = Arc::clone(&self.proxy);
        match proxy.query(message, arrival, RulesWait::Over, &mut self.buffers.own) {
            QueryDecision::Ignore | QueryDecision::AwaitRules(_) => {}
            QueryDecision::Reply => self.send_own(arrival.server, arrival.client),
            QueryDecision::Forward(query) => {
                let Some(mut query) = self.forward_delayed(query, message) else {
                    return;
                };
                if self.delayed.has_room(query.holder(), message.len()) {
                    self.delayed.add(query, message, self.now);
                } else {
                    self.fail(&mut query, Failure::Overload);
                }
            }
        }
    }

    /// Answers SERVFAIL to all clients of a query.
    pub(super) fn fail<Q: AsRef<[u8]>>(&mut self, query: &mut PendingQuery<Q>, failure: Failure) {
        let (proxy, clients, now) = (&self.proxy, &mut self.clients, self.now);
        let (own, server) = (&mut self.buffers.own, query.from.server);
        proxy.fail(query, (failure, now), own, |client, answer| {
            let one = std::iter::once((answer, client));
            clients.send(proxy, (server, client), one, now);
        });
    }

    /// Sends the delayed queries whose endpoints have room in their share, and answers the queries
    /// that have waited long enough.
    pub(super) fn retry_delayed(&mut self) {
        self.upstream.next_batch(self.in_flight.udp_limit());
        // Endpoints that have room in their share but no socket to send from.
        let mut without_socket = Vec::new();
        for _ in 0..RETRIES {
            let (upstream, now) = (&self.upstream, self.now);
            let has_share =
                |holder| !without_socket.contains(&holder) && upstream.has_share(holder);
            let has_rules = |endpoint| self.proxy.has_rules(endpoint);
            let Some(next) = self.delayed.next(now, has_share, has_rules) else {
                return;
            };
            match next {
                Next::Forward(query) => {
                    let (holder, until) = (query.holder(), query.until());
                    let back = query.act(|query, message| {
                        let left = self.forward_delayed(query, message)?;
                        Some(DelayedQuery::new(left, message, until))
                    });
                    if let Some(query) = back {
                        without_socket.push(holder);
                        self.delayed.put_back(query);
                    }
                }
                Next::Judge(query) => {
                    let (message, arrival) = query.into_parts(now);
                    self.judge_at_last(&message, &arrival);
                }
                Next::Expired(query) => {
                    query.act(|mut query, _| self.fail(&mut query, Failure::Overload));
                }
            }
        }
    }

    /// Sends a delayed query on. Returns it if it must still wait.
    fn forward_delayed<'q>(
        &mut self,
        mut query: PendingQuery<&'q [u8]>,
        message: &[u8],
    ) -> Option<PendingQuery<&'q [u8]>> {
        match self
            .upstream
            .register(&mut query, message, self.now, &self.epoll)
        {
            Ok(Registration::New(registered)) => {
                self.proxy.observer().forwarded();
                self.buffers
                    .copy_query(message, query.hop_by_hop.as_ref(), registered.id);
                self.forward_own(registered);
                None
            }
            Ok(Registration::Joined) => {
                self.proxy.observer().joined();
                None
            }
            Err(RegisterError::Full) => Some(query),
            Err(error) => {
                self.fail(&mut query, failure_of(&error));
                None
            }
        }
    }

    /// Sends a group of queries that share a socket.
    fn forward(&mut self, group: &[(FlightRef, usize)]) {
        let Some(socket) = group.first().and_then(|(p, _)| self.upstream.fd(p.socket)) else {
            return;
        };
        let datagrams = group.iter().map(|(_, at)| Datagram {
            bytes: self.clients.queries.bytes(*at),
            to: None,
            source: None,
        });
        let mut failed = [false; BATCH];
        let failures = send_all(&mut self.buffers.send, socket, datagrams, |at| {
            if let Some(failed) = failed.get_mut(at) {
                *failed = true;
            }
        });
        if failures > 0 {
            for ((registered, _), _) in group.iter().zip(failed).filter(|(_, failed)| *failed) {
                self.give_up(*registered);
            }
        }
    }

    /// Sends the query in `own`.
    pub(super) fn forward_own(&mut self, registered: FlightRef) {
        let datagram = Datagram {
            bytes: &self.buffers.own,
            to: None,
            source: None,
        };
        let socket = self.upstream.fd(registered.socket);
        let one = std::iter::once(datagram);
        if socket.is_some_and(|socket| send_all(&mut self.buffers.send, socket, one, |_| {}) > 0) {
            self.give_up(registered);
        }
    }

    /// Answers SERVFAIL to a query that could not be sent.
    fn give_up(&mut self, registered: FlightRef) {
        if let Some(mut flight) = self.upstream.remove(registered.flight) {
            self.fail(&mut flight.query, Failure::NotSent);
            self.upstream.recycle(flight.query.question);
        }
    }
}

/// The failure of a query that was not registered.
fn failure_of(error: &RegisterError) -> Failure {
    match error {
        RegisterError::Full => Failure::Overload,
        RegisterError::Socket(error) => {
            tracing::debug!(%error, "no socket to the server");
            Failure::NotSent
        }
    }
}
