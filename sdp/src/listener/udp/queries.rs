//! Receives the queries of clients and sends them to servers.

use std::sync::Arc;

use dns_policy::rule::Transport;
use dns_wire::set_id;

use super::{BATCH, Listener, Next, ROUNDS, Worker, count_unsent, listener_for};
use crate::{
    listener::{SocketOptions, delayed::DelayedQuery, send_all::send_all},
    proxy::{QueryDecision, RulesWait},
    query::{
        observe::Failure,
        pending::{Arrival, PendingQuery},
    },
    socket::sys::Datagram,
    stats::{Protocol, QueryResult},
    upstream::udp::{FlightRef, RegisterError, Registration},
};

/// Most delayed queries that are tried again in one turn. New rules can free thousands at once, and
/// the worker's other endpoints must not wait for all of them.
const RETRIES: usize = 256;

impl Worker {
    /// Receives queries from a listener and sends them on.
    pub(super) fn queries(&mut self, listener: usize) {
        for _ in 0..ROUNDS {
            let Some(Listener { fd, .. }) = self.listeners.get(listener) else {
                return;
            };
            // Any error except an empty socket is about an earlier datagram. The socket still
            // works.
            let Ok(received) = self.queries.recv(fd) else {
                return;
            };
            if let Some(leaving) = &mut self.leaving {
                leaving.packet(self.now);
            }
            self.taken += received;
            self.count_overflow(listener);
            self.lookups.clear();
            self.upstream.next_batch(self.in_flight.udp_limit());
            let mut registered = std::mem::take(&mut self.registered);
            registered.extend((0..received).filter_map(|at| Some((self.query(at)?, at))));
            // Datagrams of one size are sent as one message.
            let queries = &self.queries;
            registered.sort_unstable_by_key(|(registered, at)| {
                (registered.socket, queries.bytes(*at).len(), *at)
            });
            for group in registered.chunk_by(|(a, _), (b, _)| a.socket == b.socket) {
                self.forward(group);
            }
            registered.clear();
            self.registered = registered;
            if received < BATCH {
                return;
            }
        }
    }

    /// Judges one query. Returns its flight if it is to be sent on from the batch.
    fn query(&mut self, at: usize) -> Option<FlightRef> {
        let arrival = self.arrival(at)?;
        let message = self.queries.bytes(at);
        let batch = (&mut self.lookups, RulesWait::Allowed);
        match self
            .proxy
            .query_of_batch(message, &arrival, batch, &mut self.own)
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
                    self.own.clear();
                    self.own.extend_from_slice(message);
                    edns.strip_keepalive(&mut self.own);
                    set_id(&mut self.own, registered.id);
                    self.forward_own(registered);
                    return None;
                }
                set_id(self.queries.bytes_mut(at), registered.id);
                Some(registered)
            }
        }
    }

    /// Counts one query. Returns `None` if it has no source or no destination.
    #[inline]
    fn arrival(&self, at: usize) -> Option<Arrival> {
        let stats = self.proxy.stats();
        stats.transports.inc(Protocol::Udp);
        let server = match self.options {
            SocketOptions::Transparent => self.queries.original(at),
            SocketOptions::Plain { server } => Some(server),
        };
        let (Some(client), Some(server)) = (self.queries.from(at), server) else {
            stats.queries.inc(QueryResult::NoDestination);
            return None;
        };
        Some(Arrival {
            client,
            server,
            transport: Transport::Udp,
            at: self.now,
        })
    }

    /// Judges a query that no longer waits for the rules of its endpoint.
    fn judge_at_last(&mut self, message: &[u8], arrival: &Arrival) {
        let proxy = Arc::clone(&self.proxy);
        match proxy.query(message, arrival, RulesWait::Over, &mut self.own) {
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
        let (proxy, replies, now) = (&self.proxy, &mut self.replies, self.now);
        let (listeners, server) = (&self.listeners, query.from.server);
        proxy.fail(query, (failure, now), &mut self.own, |client, answer| {
            let one = std::iter::once((answer, client));
            let unsent = replies.send(server, one, listener_for(listeners, client), now);
            count_unsent(proxy, 1, unsent);
        });
    }

    /// Sends delayed queries whose endpoints have a place again, and answers those that have waited
    /// long enough.
    pub(super) fn retry_delayed(&mut self) {
        self.upstream.next_batch(self.in_flight.udp_limit());
        // Endpoints with a place in flight but without a socket to send from.
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
                self.own.clear();
                self.own.extend_from_slice(message);
                if let Some(edns) = &query.hop_by_hop {
                    edns.strip_keepalive(&mut self.own);
                }
                set_id(&mut self.own, registered.id);
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
            bytes: self.queries.bytes(*at),
            to: None,
            source: None,
        });
        let mut failed = [false; BATCH];
        let failures = send_all(&mut self.send, socket, datagrams, |at| {
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
            bytes: &self.own,
            to: None,
            source: None,
        };
        let socket = self.upstream.fd(registered.socket);
        let one = std::iter::once(datagram);
        if socket.is_some_and(|socket| send_all(&mut self.send, socket, one, |_| {}) > 0) {
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

    fn count_overflow(&mut self, listener: usize) {
        let (Some(total), Some(listener)) =
            (self.queries.overflow(), self.listeners.get_mut(listener))
        else {
            return;
        };
        let new = total.wrapping_sub(listener.overflow);
        listener.overflow = total;
        self.proxy.stats().receive_overflow.add(u64::from(new));
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
