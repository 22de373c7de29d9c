//! Reports of every query and its answer to an agent that has a log and metrics of
//! its own (FQDNData). Without a receiver no report is made.

use std::{
    collections::VecDeque,
    net::{IpAddr, SocketAddr},
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    time::Duration,
};

use dns_policy::{name::Fqdn, rule::Transport};
use parking_lot::Mutex;
use shared_maps::IdentityId;
use tokio::sync::Notify;

use crate::stats::Count;

/// Maximum number of waiting reports. Further reports are dropped and counted.
const QUEUE: usize = 4096;

/// Maximum number of reports that each call of [`QueryReports::allow_more`] allows, and maximum
/// number at once after a pause. Each report costs this process and the agent about 15 µs of CPU
/// time, as much as two answers.
const ALLOWED: u32 = 100;
const ALLOWED_AT_ONCE: u32 = 4096;

/// Interval at which the receiver calls [`QueryReports::allow_more`].
pub(crate) const ALLOW_EVERY: Duration = Duration::from_millis(100);

/// One query, one failure, or one answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueryReport {
    pub name: Fqdn,
    /// Type of the question as a number, for example 28 for AAAA.
    pub qtype: u16,
    /// Address and port of the client.
    pub client: SocketAddr,
    /// Identity of the client's endpoint.
    pub identity: IdentityId,
    pub server: SocketAddr,
    pub server_identity: IdentityId,
    pub transport: Transport,
    pub allowed: bool,
    pub times: Times,
    /// The event that is reported.
    pub event: Event,
}

/// Durations up to the event of a report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// Time that the proxy itself needed, without waiting.
    pub processing: Duration,
    /// The part of `processing` for the policy check.
    pub policy_check: Duration,
    /// Time for which the query waited for its server.
    pub upstream: Duration,
}

/// The event that is reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A query came and was judged.
    Query,
    /// An allowed query gets no answer.
    Failed(Failure),
    /// An answer with this content goes to the client.
    Answer(Content),
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    #[error("the DNS server did not answer in time")]
    Timeout,
    /// The query could not be sent, or the network or the server refused it.
    #[error("the query could not be sent to the DNS server")]
    Unreachable,
    /// The server's answer is malformed.
    #[error("the DNS server's answer cannot be decoded")]
    Undecodable,
    /// Too many queries are in flight.
    #[error("too many queries in flight")]
    Overload,
}

/// Parts of an answer that a report contains.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Content {
    /// Response code of the answer, such as 3 for NXDOMAIN.
    pub rcode: u8,
    /// Addresses of the name; empty unless the response code is 0.
    pub addresses: Vec<IpAddr>,
    /// Minimum of the TTLs of addresses and aliases, seconds; 0 if there are none.
    pub ttl: u32,
    /// Targets of aliases, in order.
    pub cnames: Vec<String>,
    /// Types of the records in the answer section.
    pub types: Vec<u16>,
}

/// Counters of reports since the process started.
#[derive(Clone, Debug, Default)]
pub struct QueryReportStats {
    /// Reports sent to the agent, which accepted or refused them.
    pub sent: Count,
    /// Reports not made or dropped: the agent is too slow, or there were too many.
    pub dropped: Count,
}

/// Reports that wait for the link.
#[derive(Debug, Default)]
pub struct QueryReports {
    wanted: AtomicBool,
    allowed: AtomicU32,
    queue: Mutex<VecDeque<QueryReport>>,
    work: Notify,
    stats: QueryReportStats,
}

impl QueryReports {
    /// Whether there is a receiver and one more report may be made. If it may not be made, it is
    /// counted as dropped.
    pub fn is_wanted(&self) -> bool {
        if !self.has_receiver() {
            return false;
        }
        let may = self.allowed.load(Ordering::Relaxed) > 0;
        if !may {
            self.stats.dropped.add(1);
        }
        may
    }

    /// Like [`Self::is_wanted`], for a report that is about to be made.
    pub fn reserve(&self) -> bool {
        if !self.has_receiver() {
            return false;
        }
        let relaxed = Ordering::Relaxed;
        let taken = self
            .allowed
            .fetch_update(relaxed, relaxed, |left| left.checked_sub(1));
        if taken.is_err() {
            self.stats.dropped.add(1);
        }
        taken.is_ok()
    }

    /// Gives back what [`Self::reserve`] took: the report was not made.
    pub fn unreserve(&self) {
        let relaxed = Ordering::Relaxed;
        let more = |left: u32| Some(left.saturating_add(1).min(ALLOWED_AT_ONCE));
        let _ = self.allowed.fetch_update(relaxed, relaxed, more);
    }

    fn has_receiver(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
    }

    /// Allows some more reports. Call this every `ALLOW_EVERY`.
    pub fn allow_more(&self) {
        let relaxed = Ordering::Relaxed;
        let more = |left: u32| Some(left.saturating_add(ALLOWED).min(ALLOWED_AT_ONCE));
        let _ = self.allowed.fetch_update(relaxed, relaxed, more);
    }

    /// Registers a receiver until the returned guard is dropped.
    #[must_use]
    pub fn listen(&self) -> Listening<'_> {
        self.allowed.store(ALLOWED_AT_ONCE, Ordering::Relaxed);
        self.wanted.store(true, Ordering::Relaxed);
        Listening(self)
    }

    /// Queues a report, if there is room.
    pub fn put(&self, report: QueryReport) {
        let mut queue = self.queue.lock();
        if queue.len() >= QUEUE || !self.has_receiver() {
            drop(queue);
            self.stats.dropped.add(1);
            return;
        }
        queue.push_back(report);
        drop(queue);
        self.work.notify_one();
    }

    /// Removes the oldest report from the queue.
    pub fn take(&self) -> Option<QueryReport> {
        self.queue.lock().pop_front()
    }

    /// Waits until there may be a report.
    pub async fn has_work(&self) {
        self.work.notified().await;
    }

    pub fn stats(&self) -> &QueryReportStats {
        &self.stats
    }
}

/// Guard of a registered receiver.
#[derive(Debug)]
pub struct Listening<'n>(&'n QueryReports);

impl Drop for Listening<'_> {
    fn drop(&mut self) {
        let mut queue = self.0.queue.lock();
        self.0.wanted.store(false, Ordering::Relaxed);
        queue.clear();
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn report(event: Event) -> QueryReport {
        QueryReport {
            name: Fqdn::normalise("a.com"),
            qtype: 1,
            client: SocketAddr::from(([10, 0, 0, 7], 4711)),
            identity: IdentityId(400),
            server: SocketAddr::from(([10, 0, 0, 53], 53)),
            server_identity: IdentityId(500),
            transport: Transport::Tcp,
            allowed: true,
            times: Times {
                processing: Duration::from_nanos(3),
                policy_check: Duration::from_nanos(2),
                upstream: Duration::from_nanos(40),
            },
            event,
        }
    }

    #[test]
    fn unwanted_reports_and_those_without_room_are_dropped_and_counted() {
        let reports = QueryReports::default();
        reports.put(report(Event::Query));
        assert_eq!(reports.stats().dropped.get(), 1);
        let listening = reports.listen();
        for _ in 0..=QUEUE {
            reports.put(report(Event::Query));
        }
        assert_eq!(reports.stats().dropped.get(), 2);
        assert!(reports.take().is_some());
        drop(listening);
        assert!(reports.take().is_none() && !reports.is_wanted());
    }

    #[test]
    fn a_flood_of_queries_has_no_more_notices_than_are_allowed() {
        let reports = QueryReports::default();
        assert!(!reports.reserve(), "there is no receiver");
        assert_eq!(reports.stats().dropped.get(), 0);
        let _listening = reports.listen();
        let made = |of: u32| (0..of).filter(|_| reports.reserve()).count();
        assert_eq!(made(10_000), 4096);
        assert_eq!(reports.stats().dropped.get(), 10_000 - 4096);
        assert!(!reports.is_wanted());
        reports.unreserve();
        assert_eq!(made(10), 1, "the report that was not made");
        reports.allow_more();
        assert!(reports.is_wanted());
        assert_eq!(made(10_000), 100);
        (0..1000).for_each(|_| reports.allow_more());
        assert_eq!(made(10_000), 4096, "after a pause");
    }
}
