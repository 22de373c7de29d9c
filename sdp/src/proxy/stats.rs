//! Counters of the main path. Written with relaxed atomics by every worker, read by a scrape.

use std::{
    fmt,
    marker::PhantomData,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use prometheus_client::{
    encoding::{EncodeMetric, MetricEncoder, NoLabelSet},
    metrics::MetricType,
    registry::Registry,
};

/// A closed set of label values.
pub trait Label: Copy + fmt::Debug + Send + Sync + 'static {
    /// Name of the label.
    const NAME: &'static str;
    /// Every value.
    const ALL: &'static [Self];
    /// Position in [`Self::ALL`].
    fn index(self) -> usize;
    /// Text of the value.
    fn text(self) -> &'static str;
}

/// Declares a fieldless enum that is a [`Label`].
macro_rules! label {
    ($(#[$meta:meta])* $name:ident = $label:literal { $($(#[$vmeta:meta])* $variant:ident => $text:literal),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$vmeta])* $variant),* }

        impl Label for $name {
            const NAME: &'static str = $label;
            const ALL: &'static [Self] = &[$(Self::$variant),*];
            fn index(self) -> usize { self as usize }
            fn text(self) -> &'static str { match self { $(Self::$variant => $text),* } }
        }
    };
}

label! {
    /// What became of a query that reached us.
    QueryResult = "result" {
        /// Allowed: sent on to its server, unless counted again as shed or upstream_error.
        Forwarded => "forwarded",
        /// Refused by policy: the name.
        DeniedName => "denied_name",
        /// Refused by policy: no rule is about the server.
        DeniedServer => "denied_server",
        /// Refused by policy: the endpoint has no rules there.
        DeniedNoRules => "denied_no_rules",
        /// Refused: nobody we know has the source address.
        UnknownSource => "unknown_source",
        /// Refused: came from the node itself.
        HostSource => "host_source",
        /// Refused: its destination would lead back here.
        Loop => "loop",
        /// Answered FORMERR.
        FormErr => "formerr",
        /// Answered NOTIMP.
        NotImp => "notimp",
        /// Not answered: not a query, or no header.
        Ignored => "ignored",
        /// Answered SERVFAIL: too much in flight.
        Shed => "shed",
        /// Answered SERVFAIL: could not be sent on.
        UpstreamError => "upstream_error",
        /// Lost: the kernel told no original destination.
        NoDestination => "no_destination",
    }
}

label! {
    /// What became of something an upstream server sent.
    AnswerResult = "result" {
        /// Released at once: nothing to learn, or all leased.
        Released => "released",
        /// Released after the agent realised its mapping.
        Realised => "realised",
        /// Released although the agent could not or would not realise it.
        NotRealised => "not_realised",
        /// Released because the agent is away.
        AgentAway => "agent_away",
        /// Released because the response max delay was over.
        Late => "late",
        /// Released unrealised because too many answers are held.
        HeldFull => "held_full",
        /// Turned into SERVFAIL: could not be decoded.
        Malformed => "malformed",
        /// Ignored: id or question is none that we asked.
        Unexpected => "unexpected",
        /// Could not be sent to the client.
        SendFailed => "send_failed",
    }
}

label! {
    /// Why a server was asked otherwise than transparent mode would have it: but for the
    /// first, under the node's address.
    Fallback = "reason" {
        /// The kernel's range of ports was used up; another port of the pod's address was free.
        OtherPort => "other_port",
        /// No port of the pod's address was found free.
        NoPort => "no_port",
        /// As many sockets as there may be are busy.
        TooManySockets => "too_many_sockets",
        /// The kernel does not let us.
        NotPermitted => "not_permitted",
        /// The agent's datapath would not bring the answers back.
        NoReturnPath => "no_return_path",
        /// The kernel refused it otherwise.
        Other => "other",
    }
}

label! {
    /// Transport of a query.
    Protocol = "protocol" {
        /// UDP.
        Udp => "udp",
        /// TCP.
        Tcp => "tcp",
    }
}

/// One counter per label value.
#[derive(Clone, Debug)]
pub struct Counters<L> {
    cells: Arc<[AtomicU64]>,
    label: PhantomData<L>,
}

impl<L: Label> Default for Counters<L> {
    fn default() -> Self {
        Self {
            cells: L::ALL.iter().map(|_| AtomicU64::new(0)).collect(),
            label: PhantomData,
        }
    }
}

impl<L: Label> Counters<L> {
    /// Counts one.
    pub fn inc(&self, label: L) {
        self.add(label, 1);
    }

    /// Counts `n`.
    pub fn add(&self, label: L, n: u64) {
        if let Some(cell) = self.cells.get(label.index()) {
            cell.fetch_add(n, Ordering::Relaxed);
        }
    }

    /// The count so far.
    pub fn get(&self, label: L) -> u64 {
        self.cells
            .get(label.index())
            .map_or(0, |c| c.load(Ordering::Relaxed))
    }
}

impl<L: Label> EncodeMetric for Counters<L> {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        for label in L::ALL {
            encoder
                .encode_family(&[(L::NAME, label.text())])?
                .encode_counter::<NoLabelSet, _, u64>(&self.get(*label), None)?;
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Counter
    }
}

/// A single counter.
#[derive(Clone, Debug, Default)]
pub struct Count(Arc<AtomicU64>);

impl Count {
    /// Counts `n`.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// The count so far.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl EncodeMetric for Count {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        encoder.encode_counter::<NoLabelSet, _, u64>(&self.get(), None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Counter
    }
}

/// A quantity that goes up and down.
#[derive(Clone, Debug, Default)]
pub struct Level(Arc<AtomicU64>);

impl Level {
    /// One more.
    pub fn up(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// One less.
    pub fn down(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    /// The present level.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl EncodeMetric for Level {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        encoder.encode_gauge(&i64::try_from(self.get()).unwrap_or(i64::MAX))
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Gauge
    }
}

/// Upper bounds of [`Histogram`], microseconds; the last bucket has none.
const BOUNDS_US: [u64; 14] = [
    50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000,
    10_000_000,
];

/// Durations in fixed buckets, without a lock.
#[derive(Clone, Debug, Default)]
pub struct Histogram(Arc<Buckets>);

#[derive(Debug, Default)]
struct Buckets {
    counts: [AtomicU64; BOUNDS_US.len() + 1],
    sum_us: AtomicU64,
}

impl Histogram {
    /// Records one duration.
    pub fn observe(&self, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let bucket = BOUNDS_US.partition_point(|bound| *bound < us);
        if let Some(count) = self.0.counts.get(bucket) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        self.0.sum_us.fetch_add(us, Ordering::Relaxed);
    }
}

impl EncodeMetric for Histogram {
    #[expect(
        clippy::cast_precision_loss,
        reason = "a sum for people; exact to 2^53 us"
    )]
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let bounds = BOUNDS_US
            .iter()
            .map(|us| *us as f64 / 1e6)
            .chain([f64::MAX]);
        let counts = self.0.counts.iter().map(|c| c.load(Ordering::Relaxed));
        let buckets: Vec<(f64, u64)> = bounds.zip(counts).collect();
        let count = buckets.iter().map(|b| b.1).sum();
        let sum = self.0.sum_us.load(Ordering::Relaxed) as f64 / 1e6;
        encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

/// All counters of the main path.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Queries by outcome.
    pub queries: Counters<QueryResult>,
    /// Answers by outcome.
    pub answers: Counters<AnswerResult>,
    /// Queries by transport.
    pub transports: Counters<Protocol>,
    /// Sockets that could not be had as transparent mode wants them; queries without a return path.
    pub fallbacks: Counters<Fallback>,
    /// Queries that no server answered within the timeout.
    pub upstream_timeouts: Count,
    /// Queries not sent on because the same was in flight; its answer went to them, too.
    pub joined: Count,
    /// Datagrams the kernel dropped because a receive queue was full.
    pub receive_overflow: Count,
    /// Queries waiting for their server.
    pub in_flight: Level,
    /// Answers waiting for the agent.
    pub held: Level,
    /// Client TCP connections.
    pub tcp_connections: Level,
    /// Client TCP connections closed at once because there are too many.
    pub tcp_refused: Count,
    /// From sending a query on to its answer.
    pub upstream_time: Histogram,
    /// From an answer's arrival to its release, for held answers.
    pub held_time: Histogram,
}

impl Stats {
    /// Registers every counter; `registry` carries the prefix `holdfast`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("dns_queries", "Queries by outcome", self.queries.clone());
        registry.register("dns_answers", "Answers by outcome", self.answers.clone());
        registry.register(
            "dns_transport_queries",
            "Queries by transport",
            self.transports.clone(),
        );
        registry.register(
            "dns_transparent_fallbacks",
            "Times a server was asked otherwise than transparent mode would have it",
            self.fallbacks.clone(),
        );
        registry.register(
            "dns_upstream_timeouts",
            "Queries no server answered in time",
            self.upstream_timeouts.clone(),
        );
        registry.register(
            "dns_joined",
            "Queries answered by the same query in flight",
            self.joined.clone(),
        );
        registry.register(
            "dns_receive_overflow",
            "Datagrams dropped by the kernel because a receive queue was full",
            self.receive_overflow.clone(),
        );
        registry.register(
            "dns_in_flight",
            "Queries waiting for their server",
            self.in_flight.clone(),
        );
        registry.register(
            "dns_held",
            "Answers waiting for the agent",
            self.held.clone(),
        );
        registry.register(
            "dns_tcp_connections",
            "Client TCP connections",
            self.tcp_connections.clone(),
        );
        registry.register(
            "dns_tcp_refused",
            "Client TCP connections closed because there were too many",
            self.tcp_refused.clone(),
        );
        registry.register(
            "dns_upstream_seconds",
            "From sending a query on to its answer",
            self.upstream_time.clone(),
        );
        registry.register(
            "dns_held_seconds",
            "From an answer's arrival to its release, held answers only",
            self.held_time.clone(),
        );
    }
}
