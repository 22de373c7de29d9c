//! What an answer taught us, and the port through which the agent learns it.

mod holdings;
pub mod kept;
pub mod lease;
pub mod repeat;
pub mod sink;
#[cfg(test)]
pub(crate) mod steps;

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use shared_maps::EndpointId;

use crate::{name::Fqdn, notice::Notice, policy::rule::Transport};

/// An instant of CLOCK_BOOTTIME, nanoseconds: both processes share this clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BootTime(pub u64);

impl BootTime {
    /// Now.
    pub fn now() -> Self {
        Self(shared_maps::user::boottime_ns())
    }

    /// This instant plus whole seconds.
    #[must_use]
    pub const fn plus_secs(self, secs: u64) -> Self {
        Self(self.0.saturating_add(secs.saturating_mul(1_000_000_000)))
    }

    /// This instant plus a duration.
    #[must_use]
    pub fn plus(self, duration: Duration) -> Self {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanos))
    }
}

/// One endpoint as it is now: its number may be reused, an instance is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EndpointInstance {
    /// Number.
    pub id: EndpointId,
    /// Address the query came from.
    pub client: IpAddr,
    /// Host-side interface.
    pub ifindex: u32,
}

/// Name → addresses, as one answer to one endpoint said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Who asked.
    pub endpoint: EndpointInstance,
    /// Question name.
    pub name: Fqdn,
    /// A and AAAA records reached from the question's name; never empty.
    pub addresses: Vec<IpAddr>,
    /// Least TTL of the chain, seconds.
    pub ttl: u32,
    /// When the answer came.
    pub seen_at: BootTime,
    /// Response code (0).
    pub rcode: u8,
    /// Server that answered.
    pub server: SocketAddr,
    /// Transport of the query.
    pub transport: Transport,
    /// Sent again from a table, not a live answer.
    pub replayed: bool,
}

/// What became of a mapping at the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Realised {
    /// The datapath has every address, or needs none of them.
    Yes,
    /// The agent refused it or could not plumb it; the answer is released and counted.
    No(Refusal),
    /// The agent went away or is not there.
    AgentAway,
}

/// Why the agent did not realise a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// No such endpoint instance, or it is younger than the answer.
    EndpointUnknown,
    /// The endpoint's DNS policy does not allow the name at this server.
    NotAllowed,
    /// A field is out of range.
    Invalid,
    /// Too many mappings on this stream.
    RateLimited,
    /// The datapath could not take it: map full, identities exhausted.
    NotRealised,
    /// The agent wants the client to get SERVFAIL: only those say so that have no other word
    /// for it (FQDNData).
    Rejected,
}

/// Called once, from any thread, when a held mapping's fate is known.
pub type OnRealised = Box<dyn FnOnce(Realised) + Send>;

/// What to do with the answer that carried a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// Send it now: every pair is leased.
    Leased,
    /// Send it now: no agent is there; the mapping is kept and sent later.
    AgentAway,
    /// Keep it: the callback will be called, or the response max delay ends.
    Held,
}

/// Where mappings go: the gRPC link of a standalone proxy, or the core of the
/// agent that the proxy is built into.
pub trait MappingSink: Send + Sync + 'static {
    /// Takes a mapping. `on_realised` is called only after [`Release::Held`].
    /// Must not block.
    fn learn(&self, mapping: Mapping, on_realised: OnRealised) -> Release;

    /// The same, with what else the agent may want to hear of the answer.
    fn learn_noticed(
        &self,
        mapping: Mapping,
        notice: Option<Box<Notice>>,
        on_realised: OnRealised,
    ) -> Release {
        let _ = notice;
        self.learn(mapping, on_realised)
    }

    /// Sends on what was learned on this thread, if that can be done here. A thread that
    /// declared [`crate::shared_tasks::this_thread_polls`] calls it after it learned something.
    fn push(&self) {}

    /// As [`Self::push`], and takes the results that have come for this or another thread.
    fn exchange(&self) {}

    /// Changes whenever an answer that was [`Release::Leased`] may be so no more.
    /// While it stays, the same answer is leased for another
    /// [`repeat::WITHIN`] and need not be told again. `None`: tell always.
    fn leases_version(&self) -> Option<u64> {
        None
    }
}
