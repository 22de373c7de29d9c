//! Revocations under way: which streams still have to acknowledge each of them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use dns_policy::{boot_time::BootTime, name::Fqdn};

use crate::core::event::StreamId;

/// Leases that streams were asked to drop.
#[derive(Debug)]
pub(crate) struct PendingRevocation {
    /// Streams, open or closed, that have not acknowledged yet.
    pub waiting: BTreeSet<StreamId>,
    pub name: Fqdn,
    pub addresses: Vec<IpAddr>,
    /// When the leases end by themselves.
    pub until: BootTime,
}

/// Revocations by number. The cost of an event grows only with the number of revocations that it ends, because one
/// cleaning makes thousands of revocations.
#[derive(Debug, Default)]
pub(crate) struct Revocations {
    pending: BTreeMap<u64, PendingRevocation>,
    /// The same revocations, by the time when the leases end.
    ends: BTreeSet<(BootTime, u64)>,
    /// Revocations that wait for no stream any more.
    done: Vec<u64>,
}

impl Revocations {
    pub(crate) fn insert(&mut self, id: u64, revocation: PendingRevocation) {
        self.ends.insert((revocation.until, id));
        if revocation.waiting.is_empty() {
            self.done.push(id);
        }
        self.pending.insert(id, revocation);
    }

    /// Notes that a stream acknowledged one revocation.
    pub(crate) fn acked(&mut self, stream: StreamId, id: u64) {
        if let Some(revocation) = self.pending.get_mut(&id)
            && revocation.waiting.remove(&stream)
            && revocation.waiting.is_empty()
        {
            self.done.push(id);
        }
    }

    /// Notes that a stream has no leases any more.
    pub(crate) fn forget_stream(&mut self, stream: StreamId) {
        for (id, revocation) in &mut self.pending {
            if revocation.waiting.remove(&stream) && revocation.waiting.is_empty() {
                self.done.push(*id);
            }
        }
    }

    /// Takes out the revocations that every stream acknowledged or whose leases ended.
    pub(crate) fn take_ended(&mut self, now: BootTime) -> Vec<PendingRevocation> {
        let mut ended = std::mem::take(&mut self.done);
        let expired = self.ends.iter().take_while(|(until, _)| *until <= now);
        ended.extend(expired.map(|(_, id)| *id));
        let taken = ended.into_iter().filter_map(|id| {
            let revocation = self.pending.remove(&id)?;
            self.ends.remove(&(revocation.until, id));
            Some(revocation)
        });
        taken.collect()
    }

    /// When the leases of the next revocation end by themselves.
    pub(crate) fn next_end(&self) -> Option<BootTime> {
        self.ends.first().map(|(until, _)| *until)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &PendingRevocation> {
        self.pending.values()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: BootTime = BootTime::from_nanos(1);

    fn revocation(streams: &[u64], until: u64) -> PendingRevocation {
        PendingRevocation {
            waiting: streams.iter().map(|id| StreamId(*id)).collect(),
            name: Fqdn::normalise("foo.com"),
            addresses: Vec::new(),
            until: BootTime::from_nanos(until),
        }
    }

    #[test]
    fn each_revocation_ends_once_with_its_last_stream_or_its_leases() {
        let mut all = Revocations::default();
        all.insert(1, revocation(&[], 10));
        all.insert(2, revocation(&[7], 11));
        all.insert(3, revocation(&[7, 8], 12));
        all.insert(4, revocation(&[9], 13));
        assert_eq!(all.take_ended(NOW).len(), 1, "no proxy holds a lease");
        for _ in 0..2 {
            all.acked(StreamId(7), 2);
            all.acked(StreamId(7), 3);
        }
        assert_eq!(
            all.take_ended(NOW).len(),
            1,
            "another stream did not answer"
        );
        all.forget_stream(StreamId(8));
        assert_eq!(all.take_ended(NOW).len(), 1);
        assert_eq!(all.next_end(), Some(BootTime::from_nanos(13)));
        assert!(all.take_ended(BootTime::from_nanos(12)).is_empty());
        all.acked(StreamId(9), 4);
        assert_eq!(all.take_ended(BootTime::from_nanos(13)).len(), 1, "once");
        assert_eq!((all.iter().count(), all.next_end()), (0, None));
    }

    /// One stream of two acknowledges them all: no acknowledgement looks at the other revocations.
    #[test]
    fn a_revocation_that_still_waits_is_not_looked_at_again() {
        const NAMES: u64 = 5_000;
        let mut all = Revocations::default();
        for id in 0..NAMES {
            all.insert(id, revocation(&[1, 2], 10));
        }
        for id in 0..NAMES {
            all.acked(StreamId(1), id);
            assert!(all.done.is_empty());
        }
        for id in 0..NAMES {
            all.acked(StreamId(2), id);
            assert_eq!(all.done, [id]);
            assert_eq!(all.take_ended(NOW).len(), 1);
        }
        assert!(all.pending.is_empty() && all.ends.is_empty());
    }
}
