//! A worker's way from clients to servers.

use super::{BATCH, Listener, ROUNDS, Worker};
use crate::{
    listener::{SocketOptions, replies::send_all},
    policy::rule::Transport,
    proxy::{
        Arrival, Outcome,
        stats::{Protocol, QueryResult},
    },
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
            let Ok(received) = self.recv.recv(fd) else {
                return;
            };
            if let Some(leaving) = &mut self.leaving {
                leaving.packet(self.now);
            }
            self.count_overflow(listener);
            let mut placed: [Option<(Placed, usize)>; BATCH] = [None; BATCH];
            let mut count = 0;
            for at in 0..received {
                if let Some(found) = self.query(at)
                    && let Some(slot) = placed.get_mut(count)
                {
                    *slot = Some((found, at));
                    count += 1;
                }
            }
            let placed = placed.get_mut(..count).unwrap_or_default();
            placed.sort_unstable_by_key(|p| p.map(|(p, _)| p.socket));
            let same_socket = |a: &Option<(Placed, usize)>, b: &Option<(Placed, usize)>| {
                a.map(|(p, _)| p.socket) == b.map(|(p, _)| p.socket)
            };
            for group in placed.chunk_by(same_socket) {
                self.forward(group);
            }
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
            SocketOptions::Transparent => self.recv.original(at),
            SocketOptions::Plain { server } => Some(server),
        };
        let (Some(client), Some(server)) = (self.recv.from(at), server) else {
            stats.queries.inc(QueryResult::NoDestination);
            return None;
        };
        let arrival = Arrival {
            client,
            server,
            transport: Transport::Udp,
        };
        match self
            .proxy
            .query(self.recv.bytes(at), &arrival, &mut self.own)
        {
            Outcome::Ignore => None,
            Outcome::Reply => {
                self.send_own(server, client);
                None
            }
            Outcome::Forward(query) => {
                let message = self.recv.bytes(at);
                let route = (client, server);
                let place = self
                    .upstream
                    .place(&query, message, route, self.now, &self.epoll);
                let placed = match place {
                    Ok(Place::New(placed)) => placed,
                    Ok(Place::Joined) => {
                        self.proxy.stats().joined.add(1);
                        return None;
                    }
                    Err(error) => {
                        let code = Rcode::ServFail;
                        reply::to_kept(query.kept, query.question, code, &mut self.own);
                        self.not_sent(&error);
                        self.send_own(server, client);
                        return None;
                    }
                };
                self.proxy.stats().in_flight.up();
                if let Some(edns) = query.hop_by_hop {
                    self.own.clear();
                    self.own.extend_from_slice(self.recv.bytes(at));
                    edns.strip_keepalive(&mut self.own);
                    set_id(&mut self.own, placed.id);
                    self.forward_own(placed);
                    return None;
                }
                set_id(self.recv.bytes_mut(at), placed.id);
                Some(placed)
            }
        }
    }

    /// Sends a group of queries that share a socket.
    fn forward(&mut self, group: &[Option<(Placed, usize)>]) {
        let empty = Datagram {
            bytes: &[],
            to: None,
            source: None,
        };
        let mut batch = [empty; BATCH];
        let mut len = 0;
        let mut socket = None;
        for (slot, (placed, at)) in batch.iter_mut().zip(group.iter().flatten()) {
            *slot = Datagram {
                bytes: self.recv.bytes(*at),
                to: None,
                source: None,
            };
            socket = self.upstream.fd(placed.socket);
            len += 1;
        }
        let mut failed = [socket.is_none(); BATCH];
        if let Some(socket) = socket {
            send_all(socket, batch.get(..len).unwrap_or_default(), |at| {
                if let Some(failed) = failed.get_mut(at) {
                    *failed = true;
                }
            });
        }
        for ((placed, _), failed) in group.iter().flatten().zip(failed) {
            if failed {
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
        if socket.is_some_and(|socket| send_all(socket, &[datagram], |_| {}) > 0) {
            self.give_up(placed);
        }
    }

    /// Answers SERVFAIL to a query that could not be sent.
    pub(super) fn give_up(&mut self, placed: Placed) {
        let Some(flight) = self.upstream.remove(placed.flight) else {
            return;
        };
        self.proxy.stats().in_flight.down();
        self.proxy.stats().queries.inc(QueryResult::UpstreamError);
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

    fn not_sent(&self, error: &PlaceError) {
        let result = match error {
            PlaceError::Full => QueryResult::Shed,
            PlaceError::Socket(e) => {
                tracing::debug!(error = %e, "no upstream socket");
                QueryResult::UpstreamError
            }
        };
        self.proxy.stats().queries.inc(result);
    }

    fn count_overflow(&mut self, listener: usize) {
        let (Some(total), Some(listener)) = (self.recv.overflow, self.listeners.get_mut(listener))
        else {
            return;
        };
        let new = total.wrapping_sub(listener.overflow);
        listener.overflow = total;
        self.proxy.stats().receive_overflow.add(u64::from(new));
    }
}
