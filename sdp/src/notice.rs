//! What an agent may hear of every query and its answer, for a log and metrics of
//! its own (FQDNData). While nobody listens nothing is made and nothing costs.

use std::{
    collections::VecDeque,
    net::{IpAddr, SocketAddr},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use dns_policy::{name::Fqdn, rule::Transport};
use parking_lot::Mutex;
use shared_maps::IdentityId;
use tokio::sync::Notify;

use crate::proxy::stats::Count;

/// Notices that wait at most; more are dropped and counted.
const QUEUE: usize = 4096;

/// One query, one failure, or one answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// Name that was asked for.
    pub name: Fqdn,
    /// Type that was asked for.
    pub qtype: u16,
    /// Who asked.
    pub client: SocketAddr,
    /// Identity of who asked.
    pub identity: IdentityId,
    /// Server that was asked.
    pub server: SocketAddr,
    /// Identity of the server.
    pub server_identity: IdentityId,
    /// Transport.
    pub transport: Transport,
    /// Verdict of policy.
    pub allowed: bool,
    /// What took how long.
    pub times: Times,
    /// What happened.
    pub event: Event,
}

/// What took how long, so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// Here, without waiting.
    pub processing: Duration,
    /// Of that: asking policy.
    pub policy_check: Duration,
    /// Waiting for the server.
    pub upstream: Duration,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A query came and was judged.
    Query,
    /// A query that was allowed has no answer.
    Failed(Failure),
    /// An answer came.
    Answer(Content),
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The server was silent.
    #[error("the DNS server did not answer in time")]
    Timeout,
    /// It cannot be reached.
    #[error("the query could not be sent to the DNS server")]
    Unreachable,
    /// Its answer makes no sense.
    #[error("the DNS server's answer cannot be decoded")]
    Undecodable,
    /// Too much is in flight.
    #[error("too many queries in flight")]
    Overload,
}

/// What an answer says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Content {
    /// Response code.
    pub rcode: u8,
    /// Addresses of the name; none unless the code is 0.
    pub addresses: Vec<IpAddr>,
    /// Least TTL of addresses and aliases, seconds; 0 without any.
    pub ttl: u32,
    /// What aliases lead to, in order.
    pub cnames: Vec<String>,
    /// Types of the answer section's records.
    pub types: Vec<u16>,
}

/// Counters of notices.
#[derive(Clone, Debug, Default)]
pub struct NoticeStats {
    /// Taken by the agent, or refused: told in any case.
    pub told: Count,
    /// Dropped, because the agent is too slow.
    pub dropped: Count,
}

/// Where notices wait for the link.
#[derive(Debug, Default)]
pub struct Notices {
    wanted: AtomicBool,
    queue: Mutex<VecDeque<Notice>>,
    work: Notify,
    stats: NoticeStats,
}

impl Notices {
    /// Whether anybody listens.
    pub fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
    }

    /// Somebody listens until what is returned is dropped.
    #[must_use]
    pub fn listen(&self) -> Listening<'_> {
        self.wanted.store(true, Ordering::Relaxed);
        Listening(self)
    }

    /// Queues a notice, if there is room.
    pub fn put(&self, notice: Notice) {
        let mut queue = self.queue.lock();
        if queue.len() >= QUEUE || !self.is_wanted() {
            drop(queue);
            self.stats.dropped.add(1);
            return;
        }
        queue.push_back(notice);
        drop(queue);
        self.work.notify_one();
    }

    /// The oldest one.
    pub fn take(&self) -> Option<Notice> {
        self.queue.lock().pop_front()
    }

    /// Waits until there may be one.
    pub async fn has_work(&self) {
        self.work.notified().await;
    }

    /// Counters.
    pub fn stats(&self) -> &NoticeStats {
        &self.stats
    }
}

/// Somebody listens.
#[derive(Debug)]
pub struct Listening<'n>(&'n Notices);

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

    pub(crate) fn notice(event: Event) -> Notice {
        Notice {
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
    fn what_nobody_wants_or_has_no_room_is_dropped_and_counted() {
        let notices = Notices::default();
        notices.put(notice(Event::Query));
        assert_eq!(notices.stats().dropped.get(), 1);
        let listening = notices.listen();
        for _ in 0..=QUEUE {
            notices.put(notice(Event::Query));
        }
        assert_eq!(notices.stats().dropped.get(), 2);
        assert!(notices.take().is_some());
        drop(listening);
        assert!(notices.take().is_none() && !notices.is_wanted());
    }
}
