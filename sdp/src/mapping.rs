//! Mappings from answers, and the interface by which the agent receives them.

mod holdings;
pub(crate) mod lease;
pub(crate) mod pairs;
pub(crate) mod repeat;
#[cfg(test)]
pub(crate) mod steps;

use dns_policy::mapping::{Mapping, Realised};

use crate::query_report::QueryReport;

/// Called once, from any thread, when the result for the mapping of a held answer is known.
pub type OnRealised = Box<dyn FnOnce(Realised) + Send>;

/// What to do with the answer that carried a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// Send it now: every pair is leased.
    Leased,
    /// Send it now: the agent is away or hangs, or has too many mappings of this endpoint. The
    /// mapping is kept, and sent to the agent later.
    AgentAway,
    /// Hold it until the callback is called, or until the response max delay has passed.
    Held,
}

/// Receives mappings: the gRPC link of a standalone proxy, or the core of the agent with a built-in
/// proxy.
pub trait MappingSink: Send + Sync + 'static {
    /// Takes a mapping. `on_realised` is called only after [`Release::Held`].
    /// Must not block.
    fn learn(&self, mapping: Mapping, on_realised: OnRealised) -> Release;

    /// Like `learn`, with a report of the answer for the agent.
    fn learn_reported(
        &self,
        mapping: Mapping,
        report: Option<Box<QueryReport>>,
        on_realised: OnRealised,
    ) -> Release {
        let _ = report;
        self.learn(mapping, on_realised)
    }

    /// Sends the mappings that were learned on this thread, if that can be done here. A thread that
    /// declared `shared_tasks::this_thread_polls` calls it after it learned something.
    fn push(&self) {}

    /// Like [`Self::push`]. It also handles the results that have arrived, for this or another
    /// thread.
    fn exchange(&self) {}

    /// A number that changes whenever an answer that was [`Release::Leased`] may no longer be leased.
    /// While the number is the same, the same answer counts as leased for `repeat::WITHIN`, and is not
    /// passed to [`Self::learn`] again in that time. `None`: every answer is passed to it.
    fn leases_version(&self) -> Option<u64> {
        None
    }
}
