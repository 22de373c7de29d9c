//! A worker's way from clients to servers.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use dns_policy::rule::Transport;

use super::{BATCH, Listener, Next, ROUNDS, Worker};
use crate::{
    arena::Key,
    listener::{SocketOptions, delayed::DelayedQuery, replies::send_all},
    notice::Failure,
    proxy::{
        Outcome, Patience,
        stats::{Label as _, Protocol, QueryResult},
    },
    query::pending::{Arrival, Asked, Forward},
    query_log::{End, Entries, Entry},
    socket::sys::Datagram,
    upstream::udp::{Flight, Joined, Place, PlaceError, Placed},
    wire::{Rcode, reply, set_id},
};

impl Worker {
    /// Takes queries from a listener and sends them on.
    pub(super) fn queries(&mut self, listener: usize) {
        for _ in 0..ROUNDS {
            let Some(Listener { fd, .. }) = self.listeners.get(listener) else {
                return;
            };
            // Any error but "nothing there" concerns an earlier datagram; the socket goes on.
            let Ok(received) = self.queries.recv(fd) else {
                return;
            };
            if let Some(leaving) = &mut self.leaving {
                leaving.packet(self.now);
            }
            self.taken += received;
            self.count_overflow(listener);
            self.looked.clear();
            self.upstream.next_batch(self.in_flight.udp_limit());
            let mut placed = std::mem::take(&mut self.placed);
            placed.extend((0..received).filter_map(|at| Some((self.query(at)?, at))));
            // Those of one size go out as one message.
            let queries = &self.queries;
            placed.sort_unstable_by_key(|(placed, at)| {
                (placed.socket, queries.bytes(*at).len(), *at)
            });
            for group in placed.chunk_by(|(a, _), (b, _)| a.socket == b.socket) {
                self.forward(group);
            }
            placed.clear();
            self.placed = placed;
            if received < BATCH {
                return;
            }
        }
    }

    /// Judges one query. A place, if it is to be sent on as it lies in the batch.
    fn query(&mut self, at: usize) -> Option<Placed> {
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
        let arrival = Arrival {
            client,
            server,
            transport: Transport::Udp,
            now: self.now,
        };
        let message = self.queries.bytes(at);
        let (looked, own) = ((&mut self.looked, Patience::Waits), &mut self.own);
        match self.proxy.query_of_batch(message, &arrival, looked, own) {
            Outcome::AwaitRules(endpoint) => {
                let route = (client, server);
                if !self.delayed.await_rules(endpoint, message, route, self.now) {
                    let message = message.to_vec();
                    self.judge_at_last(&message, route);
                }
                None
            }
            Outcome::Ignore => None,
            Outcome::Reply => {
                self.send_own(server, client);
                None
            }
            Outcome::Forward(mut query) => {
                let route = (client, server);
                let place = self
                    .upstream
                    .place(&query, message, route, self.now, &self.epoll);
                let placed = match place {
                    Ok(Place::New(placed)) => placed,
                    Ok(Place::Joined(flight)) => {
                        self.joined(flight, query.logged.take());
                        return None;
                    }
                    Err(PlaceError::Full)
                        if self.delayed.has_room(query.endpoint.into(), message.len()) =>
                    {
                        self.delayed.add(query, message, route, self.now);
                        return None;
                    }
                    Err(error) => {
                        let question = query.question.to_vec();
                        let question = &question;
                        self.not_placed(&error, Forward { question, ..query }, route);
                        return None;
                    }
                };
                if let Some(entry) = query.logged.take() {
                    self.upstream.log(placed.flight, entry);
                }
                self.proxy.stats().in_flight.up();
                if let Some(edns) = query.hop_by_hop {
                    self.own.clear();
                    self.own.extend_from_slice(message);
                    edns.strip_keepalive(&mut self.own);
                    set_id(&mut self.own, placed.id);
                    self.forward_own(placed);
                    return None;
                }
                set_id(self.queries.bytes_mut(at), placed.id);
                Some(placed)
            }
        }
    }

    /// Judges a query that waits no longer for the rules of its endpoint.
    fn judge_at_last(&mut self, message: &[u8], route: (SocketAddr, SocketAddr)) {
        let (client, server) = route;
        let arrival = Arrival {
            client,
            server,
            transport: Transport::Udp,
            now: self.now,
        };
        let proxy = Arc::clone(&self.proxy);
        match proxy.query(message, &arrival, Patience::Over, &mut self.own) {
            Outcome::Ignore | Outcome::AwaitRules(_) => {}
            Outcome::Reply => self.send_own(server, client),
            Outcome::Forward(query) => {
                let Some(query) = self.forward_delayed(query, message, route) else {
                    return;
                };
                if self.delayed.has_room(query.endpoint.into(), message.len()) {
                    self.delayed.add(query, message, route, self.now);
                } else {
                    self.not_placed(&PlaceError::Full, query, route);
                }
            }
        }
    }

    /// The query waits for the answer to the same one in flight.
    fn joined(&mut self, flight: Key, logged: Option<Box<Entry>>) {
        self.proxy.stats().joined.add(1);
        if let Some(entry) = logged {
            self.upstream.log(flight, entry);
        }
    }

    /// Answers SERVFAIL to a query that finds no place or no socket.
    fn not_placed(
        &mut self,
        error: &PlaceError,
        mut query: Forward<'_>,
        (client, server): (SocketAddr, SocketAddr),
    ) {
        let code = Rcode::ServFail;
        reply::to_kept(query.kept, query.question, code, &mut self.own);
        let (result, failure) = self.not_sent(error);
        let asked = Asked {
            question: query.question,
            endpoint: query.endpoint,
            client,
            server,
            transport: Transport::Udp,
            identities: query.identities,
            policy_check: query.policy_check,
            waited: Duration::ZERO,
        };
        self.proxy.observer().report_failure(&asked, failure);
        if let Some(entry) = query.logged.take() {
            let end = End::own(result.text(), code);
            self.proxy.observer().log(entry, end, self.now);
        }
        self.send_own(server, client);
    }

    /// Sends delayed queries on whose endpoints have a place again, and answers those that have
    /// waited long enough.
    pub(super) fn retry_delayed(&mut self) {
        self.upstream.next_batch(self.in_flight.udp_limit());
        // Endpoints that have a place in flight and no socket to send from.
        let mut without_socket = Vec::new();
        loop {
            let (upstream, now) = (&self.upstream, self.now);
            let has_place =
                |holder| !without_socket.contains(&holder) && upstream.has_place(holder);
            let has_rules = |endpoint| self.proxy.has_rules(endpoint);
            let Some(next) = self.delayed.next(now, has_place, has_rules) else {
                return;
            };
            match next {
                Next::Place(route, query) => {
                    let (holder, until) = (query.holder(), query.until());
                    let back = query.act(|query, message| {
                        let left = self.forward_delayed(query, message, route)?;
                        Some(DelayedQuery::new(left, message, until))
                    });
                    if let Some(query) = back {
                        without_socket.push(holder);
                        self.delayed.put_back(route, query);
                    }
                }
                Next::Judge(route, message) => self.judge_at_last(&message, route),
                Next::Expired(route, query) => {
                    query.act(|query, _| self.not_placed(&PlaceError::Full, query, route));
                }
            }
        }
    }

    /// Sends a delayed query on. Returns it if it must wait on.
    fn forward_delayed<'q>(
        &mut self,
        mut query: Forward<'q>,
        message: &[u8],
        route: (SocketAddr, SocketAddr),
    ) -> Option<Forward<'q>> {
        let place = self
            .upstream
            .place(&query, message, route, self.now, &self.epoll);
        match place {
            Ok(Place::New(placed)) => {
                if let Some(entry) = query.logged.take() {
                    self.upstream.log(placed.flight, entry);
                }
                self.proxy.stats().in_flight.up();
                self.own.clear();
                self.own.extend_from_slice(message);
                if let Some(edns) = &query.hop_by_hop {
                    edns.strip_keepalive(&mut self.own);
                }
                set_id(&mut self.own, placed.id);
                self.forward_own(placed);
                None
            }
            Ok(Place::Joined(flight)) => {
                self.joined(flight, query.logged.take());
                None
            }
            Err(PlaceError::Full) => Some(query),
            Err(error) => {
                self.not_placed(&error, query, route);
                None
            }
        }
    }

    /// Sends a group of queries that share a socket.
    fn forward(&mut self, group: &[(Placed, usize)]) {
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
            for ((placed, _), _) in group.iter().zip(failed).filter(|(_, failed)| *failed) {
                self.give_up(*placed);
            }
        }
    }

    /// Sends the query in `own`.
    fn forward_own(&mut self, placed: Placed) {
        let datagram = Datagram {
            bytes: &self.own,
            to: None,
            source: None,
        };
        let socket = self.upstream.fd(placed.socket);
        let one = std::iter::once(datagram);
        if socket.is_some_and(|socket| send_all(&mut self.send, socket, one, |_| {}) > 0) {
            self.give_up(placed);
        }
    }

    /// Answers SERVFAIL to a query that could not be sent.
    pub(super) fn give_up(&mut self, placed: Placed) {
        let Some(mut flight) = self.upstream.remove(placed.flight) else {
            return;
        };
        let result = QueryResult::UpstreamError.text();
        self.log(&mut flight.logged, End::own(result, Rcode::ServFail));
        self.proxy.stats().in_flight.down();
        self.proxy.stats().queries.inc(QueryResult::UpstreamError);
        self.notice_failure(&flight, Failure::Unreachable);
        self.servfail(&flight);
        self.upstream.recycle(flight);
    }

    /// Answers SERVFAIL to all who asked.
    pub(super) fn servfail(&mut self, flight: &Flight) {
        let first = Joined {
            client: flight.client,
            kept: flight.kept,
        };
        for Joined { client, kept } in std::iter::once(&first).chain(&flight.joined) {
            reply::to_kept(*kept, &flight.question, Rcode::ServFail, &mut self.own);
            self.send_own(flight.server, *client);
        }
    }

    fn not_sent(&self, error: &PlaceError) -> (QueryResult, Failure) {
        let (result, failure) = match error {
            PlaceError::Full => (QueryResult::Shed, Failure::Overload),
            PlaceError::Socket(e) => {
                tracing::debug!(error = %e, "no upstream socket");
                (QueryResult::UpstreamError, Failure::Unreachable)
            }
        };
        self.proxy.stats().queries.inc(result);
        (result, failure)
    }

    /// Ends the query log's entry of a query that is given up because the process ends.
    pub(super) fn log_cut(&self, entry: Option<Box<Entry>>) {
        if let Some(entry) = entry {
            self.proxy
                .observer()
                .log(entry, End::unanswered("cut"), self.now);
        }
    }

    /// Ends the query log's entries of a query.
    pub(super) fn log(&self, entries: &mut Entries, end: End) {
        for entry in entries.drain(..) {
            self.proxy.observer().log(entry, end, self.now);
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
