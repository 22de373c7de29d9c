//! Leases that proxies hold, by the stream on which each was given.
//!
//! Owns the open streams, the end of the last lease of each, the streams that closed with leases,
//! and the revocations under way. It keeps one invariant: as long as the holder of a lease may
//! answer under it, its revocation waits for that stream. The wait ends with an acknowledgement,
//! with the end of the process that holds the lease, or with the end of the lease.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use dns_policy::{boot_time::BootTime, name::Fqdn};

use super::revocations::{PendingRevocation, Revocations};
use crate::{
    core::event::{Revocation, RevokeAck, StreamId},
    fqdn::cache::after_lease,
};

/// How soon a stream closes after its process ended, seconds. A stream that closes later belonged to
/// another process.
const CLOSES_WITHIN: u64 = 5;

/// The leases that streams hold, and their revocations.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    open: BTreeSet<StreamId>,
    /// When the last lease given to an open stream ends.
    promised: BTreeMap<StreamId, BootTime>,
    /// Open streams whose process has ended, and when: they close without leases.
    holderless: BTreeMap<StreamId, BootTime>,
    /// Closed streams, until some seconds after the end of their last lease ([`after_lease`]).
    departed: BTreeMap<StreamId, BootTime>,
    revocations: Revocations,
    last_revocation: u64,
}

impl Leases {
    /// Records that a stream opened: leases may be given to it.
    pub(crate) fn open(&mut self, stream: StreamId) {
        self.open.insert(stream);
    }

    /// Whether leases may be given to this stream.
    pub(crate) fn is_open(&self, stream: StreamId) -> bool {
        self.open.contains(&stream)
    }

    /// Records a lease that ends at `until`. Only the latest end of each stream is kept.
    pub(crate) fn promise(&mut self, stream: StreamId, until: BootTime) {
        let last = self.promised.entry(stream).or_default();
        *last = until.max(*last);
    }

    /// Notes that a stream closed. Its proxy may not have noticed, and may still answer under the
    /// leases it has: they are honoured, whether their revocation is under way or comes later.
    pub(crate) fn close(&mut self, stream: StreamId, now: BootTime) {
        self.open.remove(&stream);
        self.departed.retain(|_, until| *until > now);
        let promised = self.promised.remove(&stream);
        let ended = self.holderless.remove(&stream);
        let ended = ended.filter(|at| now <= at.plus_secs(CLOSES_WITHIN));
        let promised = promised.filter(|_| ended.is_none());
        if let Some(until) = promised.map(after_lease)
            && until > now
        {
            self.departed.insert(stream, until);
        }
        if !self.departed.contains_key(&stream) {
            self.revocations.forget_stream(stream);
        }
    }

    /// Notes that the process that holds the leases of these streams has ended, and with it the
    /// leases.
    pub(crate) fn end_holder(&mut self, streams: &[StreamId], now: BootTime) {
        for stream in streams {
            if self.open.contains(stream) {
                // The stream closes soon, unless another process took the connection over.
                self.holderless.insert(*stream, now);
            } else {
                self.departed.remove(stream);
                self.revocations.forget_stream(*stream);
            }
        }
    }

    /// Notes that proxies dropped the leases of revocations.
    pub(crate) fn acknowledge(&mut self, acks: &[RevokeAck]) {
        for ack in acks {
            self.revocations.acked(ack.stream, ack.id);
        }
    }

    /// Begins to revoke the leases of a name's addresses, the last of which ends at `until`.
    pub(crate) fn revoke(
        &mut self,
        name: Fqdn,
        addresses: Vec<IpAddr>,
        until: BootTime,
        now: BootTime,
    ) -> Revocation {
        self.last_revocation += 1;
        self.departed.retain(|_, until| *until > now);
        let departed = self.departed.keys();
        let pending = PendingRevocation {
            waiting: self.open.iter().chain(departed).copied().collect(),
            name: name.clone(),
            addresses: addresses.clone(),
            until: after_lease(until),
        };
        self.revocations.insert(self.last_revocation, pending);
        Revocation {
            id: self.last_revocation,
            streams: self.open.iter().copied().collect(),
            name,
            addresses,
        }
    }

    /// Takes out the revocations that every stream acknowledged or whose leases ended.
    pub(crate) fn take_ended(&mut self, now: BootTime) -> Vec<PendingRevocation> {
        self.revocations.take_ended(now)
    }

    /// When the leases of the next revocation end by themselves.
    pub(crate) fn next_end(&self) -> Option<BootTime> {
        self.revocations.next_end()
    }

    /// Revocations that some stream has not acknowledged yet.
    pub(crate) fn pending(&self) -> impl Iterator<Item = &PendingRevocation> {
        self.revocations.iter()
    }
}
