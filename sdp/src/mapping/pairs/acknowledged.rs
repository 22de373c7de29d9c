//! What an agent without leases has acknowledged of each pair (FQDNData).
//!
//! Such an agent keeps an acknowledged pair open for the TTL that it was sent, for the endpoint
//! that asked, and forgets it in one case before that: a name has more addresses than it keeps of
//! one name of one endpoint. So a name of many addresses counts as not acknowledged.

use std::net::IpAddr;

use dns_policy::{boot_time::BootTime, mapping::Mapping};

use super::{
    PairTable,
    key::{Asked, Key},
};

/// Addresses that one endpoint has of a name at most for them to count as acknowledged. Releases
/// of Cilium keep 50 or more, which may be of two proxies.
const MOST_ADDRESSES: usize = 16;

/// One connection to an agent. Another connection may be to another agent, which has none of the
/// data.
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
    /// In `session`: the TTL that the agent was sent runs `until` then.
    pub(crate) fn new(until: BootTime, session: Session) -> Self {
        Self { until, session }
    }

    /// Of two acknowledgements of one session the longer one counts, as in the agent's cache.
    fn and(self, later: Self) -> Self {
        if self.session == later.session && self.until > later.until {
            self
        } else {
            later
        }
    }
}

impl PairTable {
    /// The agent has acknowledged these pairs.
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

    /// The agent refused pairs of this name, or did not answer: it may have none of them.
    pub(crate) fn unacknowledge(&mut self, key: &Key) {
        if let Some(name) = self.name_mut(key) {
            for pair in name.pairs.values_mut() {
                pair.acknowledged = Acknowledged::default();
            }
        }
    }

    /// Whether the agent has acknowledged each pair of a mapping in this session, for its own
    /// endpoint, and until then at least.
    pub(crate) fn is_acknowledged(
        &self,
        mapping: &Mapping,
        until: BootTime,
        session: Session,
    ) -> bool {
        // Without an interface nothing tells an endpoint from a later one with its number.
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
