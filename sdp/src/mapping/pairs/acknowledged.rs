//! The pairs that an agent without leases (FQDNData) has acknowledged.
//!
//! Such an agent keeps an acknowledged pair open for the TTL in the mapping, for the endpoint that
//! sent the query. Two events end a pair earlier (docs/src/under-cilium.md):
//!
//! - The agent limits the addresses of one name of one endpoint, and the name has more of them. So a
//!   name with many addresses counts as not acknowledged (`MOST_ADDRESSES`).
//! - `cilium-dbg fqdn cache clean`. The proxy gets no message about it.

use std::net::IpAddr;

use dns_policy::{boot_time::BootTime, mapping::Mapping};

use super::{
    PairTable,
    key::{Asked, Key},
};

/// If an endpoint has more addresses of a name than this, none of them counts as acknowledged.
/// Cilium's agent has a limit of 50 or more, and two proxies may report different addresses.
const MOST_ADDRESSES: usize = 16;

/// One connection to an agent. The next connection may lead to another agent, which has none of the
/// pairs that this agent acknowledged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Session(u32);

impl Session {
    /// Begins another session, in which earlier acknowledgements do not count.
    pub(crate) fn end(&mut self) {
        self.0 = self.0.wrapping_add(1);
    }
}

/// An agent's acknowledgement of a pair.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Acknowledged {
    until: BootTime,
    session: Session,
}

impl Acknowledged {
    /// An acknowledgement of `session`. The TTL in the mapping ends at `until`.
    pub(crate) fn new(until: BootTime, session: Session) -> Self {
        Self { until, session }
    }

    /// Merges two acknowledgements. If both are of one session, the one that ends later counts, as
    /// in the agent's cache. Otherwise the one of the later session counts.
    fn and(self, later: Self) -> Self {
        if self.session == later.session && self.until > later.until {
            self
        } else {
            later
        }
    }
}

impl PairTable {
    /// Notes that the agent has acknowledged these pairs.
    pub(crate) fn acknowledge(
        &mut self,
        key: &Key,
        addresses: &[IpAddr],
        acknowledged: Acknowledged,
    ) {
        let Some(name) = self.name_mut(key) else {
            return;
        };
        for address in addresses {
            if let Some(pair) = name.pairs.get_mut(address) {
                pair.acknowledged = pair.acknowledged.and(acknowledged);
            }
        }
    }

    /// Notes that the agent refused pairs of this name or sent no result, so it may have none of
    /// them.
    pub(crate) fn unacknowledge(&mut self, key: &Key) {
        if let Some(name) = self.name_mut(key) {
            for pair in name.pairs.values_mut() {
                pair.acknowledged = Acknowledged::default();
            }
        }
    }

    /// Whether the agent has acknowledged each pair of a mapping in `session`, for the mapping's
    /// endpoint, until `until` or later.
    pub(crate) fn is_acknowledged(
        &self,
        mapping: &Mapping,
        until: BootTime,
        session: Session,
    ) -> bool {
        // Without an interface, a later endpoint with the same number could not be distinguished.
        if mapping.endpoint.ifindex == 0 {
            return false;
        }
        let asked = self.names.get(&mapping.name);
        let Some(name) = asked.and_then(|asked| asked.get(&Asked::of(mapping))) else {
            return false;
        };
        name.pairs.len() <= MOST_ADDRESSES
            && mapping.addresses.iter().all(|address| {
                let acknowledged = name.pairs.get(address).map(|pair| pair.acknowledged);
                acknowledged.is_some_and(|of| of.session == session && of.until >= until)
            })
    }
}
