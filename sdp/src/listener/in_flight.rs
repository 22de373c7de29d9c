//! The limit on queries in flight, and its division between UDP and TCP.

use limits::quota::{Holder, Permit, SharedQuota};

use crate::stats::Level;

/// The limit of one process.
///
/// Each UDP worker counts its own queries in a [`Quota`](limits::quota::Quota), without a lock for
/// each query. All TCP connections count together. Neither transport uses the units of the other,
/// so that an endpoint's share stays free whichever transport other endpoints use.
#[derive(Clone, Debug)]
pub(super) struct InFlight {
    limit: usize,
    workers: usize,
    tcp: SharedQuota,
    /// Number of queries in flight over UDP and TCP together.
    all: Level,
}

impl InFlight {
    /// A limit of `limit` queries. `all` counts the queries of UDP and TCP.
    pub(super) fn new(limit: usize, workers: usize, all: Level) -> Self {
        Self {
            limit,
            workers: workers.max(1),
            tcp: SharedQuota::new(limit),
            all,
        }
    }

    /// The number of queries that each UDP worker may have in flight now.
    pub(super) fn udp_limit(&self) -> usize {
        let left = self.limit.saturating_sub(self.tcp.used());
        left.div_ceil(self.workers)
    }

    /// A permit for a query over TCP. `None` if its endpoint has used its share.
    pub(super) fn tcp_permit(&self, holder: Holder) -> Option<Permit> {
        let all = usize::try_from(self.all.get()).unwrap_or(usize::MAX);
        let udp = all.saturating_sub(self.tcp.used());
        self.tcp.take_with(holder, udp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_transport_leaves_room_for_the_other() {
        let all = Level::default();
        let in_flight = InFlight::new(16, 2, all.clone());
        assert_eq!(in_flight.udp_limit(), 8);
        let taken: Vec<_> = std::iter::from_fn(|| {
            let permit = in_flight.tcp_permit(Holder::Unknown)?;
            all.up();
            Some(permit)
        })
        .collect();
        assert_eq!((taken.len(), in_flight.udp_limit()), (8, 4));
        // UDP takes the share that one holder could still use.
        (0..4).for_each(|_| all.up());
        assert!(in_flight.tcp_permit(Holder::Unknown).is_none());
        assert!(in_flight.tcp_permit(Holder::Host).is_some());
    }
}
