//! Counters of the main path. Every thread writes to its own memory, and a scrape adds up all of
//! it.

mod cells;
mod histogram;
mod labels;

use std::{fmt, marker::PhantomData};

use daemon::{
    families,
    metrics::{Families, meanings},
};
use prometheus_client::{collector::Collector, encoding::DescriptorEncoder};

use self::cells::Cells;
pub(crate) use self::histogram::STAGE_MEANINGS;
pub use self::{
    histogram::{Stage, Stages},
    labels::{AnswerResult, Fallback, Protocol, QueryResult},
};
pub use daemon::metrics::Label;

/// One counter per label value.
#[derive(Clone, Debug)]
pub struct Counters<L> {
    cells: Cells,
    label: PhantomData<L>,
}

impl<L: Label> Default for Counters<L> {
    fn default() -> Self {
        Self {
            cells: Cells::new(L::ALL.len()),
            label: PhantomData,
        }
    }
}

impl<L: Label> Counters<L> {
    pub fn inc(&self, label: L) {
        self.add(label, 1);
    }

    pub fn add(&self, label: L, n: u64) {
        self.cells.add(label.index(), n);
    }

    /// Sum over all threads so far.
    pub fn get(&self, label: L) -> u64 {
        self.cells.get(label.index())
    }
}

/// A single counter, which has no label.
#[derive(Clone, Debug)]
pub struct Count(Cells);

impl Default for Count {
    fn default() -> Self {
        Self(Cells::new(1))
    }
}

impl Count {
    pub fn add(&self, n: u64) {
        self.0.add(0, n);
    }

    /// Sum over all threads so far.
    pub fn get(&self) -> u64 {
        self.0.get(0)
    }
}

/// A quantity that goes up and down.
#[derive(Clone, Debug)]
pub struct Level(Cells);

impl Default for Level {
    fn default() -> Self {
        Self(Cells::new(1))
    }
}

impl Level {
    pub fn up(&self) {
        self.0.add(0, 1);
    }

    pub fn down(&self) {
        self.0.add(0, u64::MAX);
    }

    /// Changes one summand of the level from `old` to `new`.
    pub fn change(&self, old: usize, new: usize) {
        let [old, new] = [old, new].map(|n| u64::try_from(n).unwrap_or(u64::MAX));
        self.0.add(0, new.wrapping_sub(old));
    }

    /// The present level. While other threads write, it may be off by their changes.
    pub fn get(&self) -> u64 {
        // It can be below zero for a moment: the "down" of one thread was seen before the "up" of
        // another.
        u64::try_from(self.0.get(0).cast_signed()).unwrap_or(0)
    }
}

/// All counters of the main path.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    pub queries: Counters<QueryResult>,
    pub answers: Counters<AnswerResult>,
    pub transports: Counters<Protocol>,
    /// Sockets that could not be opened as transparent mode needs them, and queries without a
    /// return path.
    pub fallbacks: Counters<Fallback>,
    /// Queries that no server answered within the timeout.
    pub upstream_timeouts: Count,
    /// Queries that were not sent on because an equal query was in flight, whose answer they got.
    pub joined: Count,
    /// Addresses of answers above the number that is learned from one answer.
    pub addresses_left_out: Count,
    /// Datagrams the kernel dropped because a receive queue was full.
    pub receive_overflow: Count,
    /// Queries waiting for their server.
    pub in_flight: Level,
    /// Answers waiting for the agent.
    pub held: Level,
    /// Open TCP connections of clients.
    pub tcp_connections: Level,
    /// TCP connections of clients that were closed at once: the endpoint's share is used up, or the
    /// destination is not a server.
    pub tcp_refused: Count,
    /// Bytes of memory that client TCP connections use for messages.
    pub tcp_bytes: Level,
    /// Client TCP connections closed because their endpoint's share of that memory was used up.
    pub tcp_overdrawn: Count,
    /// Open TCP connections to servers.
    pub server_connections: Level,
    /// TCP connections to servers that were begun.
    pub server_connections_made: Count,
    pub stages: Stages,
}

impl Collector for Stats {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Families(&mut encoder);
        families! { out;
            /// Queries of clients, by result. A query that the proxy tried to forward without
            /// success counts twice: as forwarded, and as shed or upstream_error.
            counter_by dns_queries = |result| self.queries.get(result);
            /// Messages of DNS servers, by result. A message that answers several equal queries
            /// counts once for each query.
            counter_by dns_answers = |result| self.answers.get(result);
            /// Queries of clients, by transport protocol.
            counter_by dns_transport_queries = |protocol| self.transports.get(protocol);
            /// Sockets to DNS servers that did not get the source address or port of transparent
            /// mode, by reason. The reason no_return_path counts queries instead of sockets.
            counter_by dns_transparent_fallbacks = |fallback| self.fallbacks.get(fallback);
            /// Queries that their DNS server did not answer within 10 s. Their clients got no
            /// answer.
            counter dns_upstream_timeouts = self.upstream_timeouts.get();
            /// Queries that the proxy did not forward because the same query of the same pod was in
            /// flight. They got the answer of that query.
            counter dns_joined = self.joined.get();
            /// Addresses beyond the first 1,024 of an answer. The pod got these addresses, but they
            /// are not learned and not open.
            counter dns_addresses_left_out = self.addresses_left_out.get();
            /// Queries that the kernel dropped before the proxy received them, because the receive
            /// queue was full.
            counter dns_receive_overflow = self.receive_overflow.get();
            /// Queries that are waiting for their DNS server.
            gauge dns_in_flight = self.in_flight.get();
            /// Answers that are waiting until the agent has opened their addresses.
            gauge dns_held = self.held.get();
            /// Open TCP connections of clients.
            gauge dns_tcp_connections = self.tcp_connections.get();
            /// TCP connections of clients that the proxy closed at once, because the pod had used
            /// up its share of all connections, or because their destination was the proxy itself
            /// or a loopback address.
            counter dns_tcp_refused = self.tcp_refused.get();
            /// Memory that waiting queries and answers use on TCP connections, without the first 16
            /// KiB of each connection.
            gauge dns_tcp_buffers_bytes = self.tcp_bytes.get();
            /// TCP connections of clients that the proxy closed because the pod had used up its
            /// share of the memory in holdfast_dns_tcp_buffers_bytes: the pod does not read its
            /// answers, or its servers do not read its queries.
            counter dns_tcp_overdrawn = self.tcp_overdrawn.get();
            /// Open TCP connections to DNS servers, including idle ones.
            gauge dns_tcp_server_connections = self.server_connections.get();
            /// TCP connections to DNS servers that the proxy began to open.
            counter dns_tcp_server_connections_made = self.server_connections_made.get();
            /// Duration of the stages of a query. Name and labels are the same as in Cilium.
            durations proxy_upstream_reply_seconds = &self.stages;
        }
    }
}

impl Stats {
    /// Values of labels with their meanings: metric, label, value, meaning.
    pub fn meanings() -> Vec<[&'static str; 4]> {
        let stages = STAGE_MEANINGS
            .iter()
            .map(|(label, value, meaning)| ["proxy_upstream_reply", label, value, meaning]);
        meanings::<QueryResult>("dns_queries")
            .chain(meanings::<AnswerResult>("dns_answers"))
            .chain(meanings::<Protocol>("dns_transport_queries"))
            .chain(meanings::<Fallback>("dns_transparent_fallbacks"))
            .chain(stages)
            .collect()
    }
}
