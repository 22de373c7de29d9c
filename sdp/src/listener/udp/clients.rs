//! The sockets of clients, for queries and answers.

use std::{net::SocketAddr, os::fd::OwnedFd, sync::Arc, time::Instant};

use daemon::port_hold;
use dns_policy::rule::Transport;

use crate::{
    listener::{SocketOptions, releases::count_unsent, reply_sender::ReplySender},
    proxy::Proxy,
    query::pending::Arrival,
    socket::sys::RecvBatch,
    stats::{Protocol, QueryResult, Stats},
};

/// A socket that receives queries.
pub(super) struct Listener {
    pub(super) fd: Arc<OwnedFd>,
    pub(super) ipv6: bool,
    pub(super) overflow: u32,
}

pub(super) struct Clients {
    options: SocketOptions,
    pub(super) listeners: Vec<Listener>,
    /// Buffers for queries.
    pub(super) queries: RecvBatch,
    replies: ReplySender,
}

impl Clients {
    pub(super) fn new(options: SocketOptions, listeners: Vec<Listener>) -> Self {
        Self {
            options,
            listeners,
            queries: RecvBatch::addressed(),
            replies: ReplySender::new(options),
        }
    }

    /// Receives a batch of queries. Returns their number, and counts the queries that were lost.
    pub(super) fn receive(&mut self, listener: usize, stats: &Stats) -> Option<usize> {
        let listener = self.listeners.get_mut(listener)?;
        // Any error except "would block" is about an earlier datagram. The socket still works.
        let received = self.queries.recv(&listener.fd).ok()?;
        if let Some(total) = self.queries.overflow() {
            let new = total.wrapping_sub(listener.overflow);
            listener.overflow = total;
            stats.receive_overflow.add(u64::from(new));
        }
        Some(received)
    }

    /// Counts one query. Returns `None` if it has no source or no destination.
    #[inline]
    pub(super) fn arrival(&self, at: usize, now: Instant, stats: &Stats) -> Option<Arrival> {
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
            at: now,
        })
    }

    /// Sends answers of `server` through the listener of the peer's family, and counts the answers
    /// that cannot be sent.
    #[inline]
    pub(super) fn send<'a>(
        &mut self,
        proxy: &Proxy,
        (server, peer): (SocketAddr, SocketAddr),
        answers: impl ExactSizeIterator<Item = (&'a [u8], SocketAddr)> + Clone,
        now: Instant,
    ) {
        let same = self.listeners.iter().find(|l| l.ipv6 == peer.is_ipv6());
        let listener = &same
            .or(self.listeners.first())
            .expect("a worker has at least one listener")
            .fd;
        let wanted = answers.len();
        let unsent = self.replies.send(server, answers, listener, now);
        count_unsent(proxy, wanted, unsent);
    }

    /// Makes the kernel give later queries to other processes.
    pub(super) fn deafen(&self) {
        for listener in &self.listeners {
            if let Err(e) = port_hold::deafen(&listener.fd, listener.ipv6) {
                tracing::warn!(error = %e, "a draining listener still receives new queries");
            }
        }
    }
}
