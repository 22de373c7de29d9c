//! What the network says of queries that it could not deliver.

use nix::sys::{
    epoll::{EpollEvent, EpollFlags},
    socket::{MsgFlags, recv},
};
use std::os::fd::AsRawFd as _;

use super::Worker;
use crate::{
    arena::Key,
    proxy::stats::QueryResult,
    upstream::udp::{Flight, Joined},
    wire::reply,
};

/// Errors taken from one socket before others get their turn.
const ERRORS: usize = 64;
/// Most bytes of a query that an ICMP error brings back (RFC 1812, 4.3.2.3).
const RETURNED: usize = 576;

impl Worker {
    /// Something came from a server, or from the network on the way to it.
    pub(super) fn server_event(&mut self, event: EpollEvent) {
        let socket = Key::from_u64(event.data());
        if event.events().contains(EpollFlags::EPOLLERR) {
            self.undelivered(socket);
        }
        self.answers(socket);
    }

    /// ICMP errors carry the query that they are about: that one is answered, the others on
    /// the socket wait on.
    fn undelivered(&mut self, socket: Key) {
        let mut query = [0; RETURNED];
        for _ in 0..ERRORS {
            let Some(fd) = self.upstream.fd(socket) else {
                return;
            };
            let flags = MsgFlags::MSG_ERRQUEUE | MsgFlags::MSG_DONTWAIT;
            let Ok(length) = recv(fd.as_raw_fd(), &mut query, flags) else {
                return;
            };
            let query = query.get(..length).unwrap_or_default();
            if let Some(flight) = self.upstream.undelivered(socket, query) {
                self.unreachable(&flight);
                self.upstream.recycle(flight);
            }
        }
    }

    /// Answers SERVFAIL, Network Error, to all who asked.
    fn unreachable(&mut self, flight: &Flight) {
        self.proxy.stats().in_flight.down();
        self.proxy.stats().queries.inc(QueryResult::UpstreamError);
        let first = Joined {
            client: flight.client,
            kept: flight.kept,
        };
        for Joined { client, kept } in std::iter::once(&first).chain(&flight.joined) {
            reply::unreachable(*kept, &flight.question, &mut self.own);
            self.send_own(flight.server, *client);
        }
    }
}
