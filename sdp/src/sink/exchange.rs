//! Messages between the sink and the link, and the state of the sink for `status`.

use dns_policy::{
    boot_time::BootTime,
    mapping::{Mapping, Refusal},
};

use crate::{query_report::QueryReport, stats::Count};

/// Result of a mapping that the sink sent.
#[derive(Clone, Debug)]
pub struct MappingResult {
    /// Number with which the sink sent the mapping.
    pub sequence: u64,
    /// What the agent grants for a realised mapping, or why it is not realised.
    pub result: Result<Grant, Refusal>,
}

/// What an agent grants with a realised mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Whether the agent would restore the mapping after a restart.
    pub durable: bool,
    /// How long the mapping's pairs stay plumbed.
    pub promise: Promise,
    /// Policy revision under which the mapping was realised.
    pub revision: u64,
}

/// How long an agent keeps the pairs of a mapping that it realised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Promise {
    /// The agent gives no time.
    None,
    /// A lease that lasts until this time, unless the agent revokes it earlier.
    Until(BootTime),
    /// For the TTL in the sent mapping, and only for the endpoint of that mapping (FQDNData).
    ForItsTtl,
}

/// Effect of an acknowledgement of [`Promise::ForItsTtl`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Acknowledgements {
    /// The acknowledgement also covers the same answer to the same endpoint while the TTL runs.
    #[default]
    Reused,
    /// The acknowledgement covers only its own answer.
    CountOnce,
}

impl Promise {
    /// The promise of a lease that ends at `end`; `None` if there is no lease.
    pub fn of_lease(end: Option<BootTime>) -> Self {
        end.map_or(Self::None, Self::Until)
    }
}

/// A mapping to be sent.
#[derive(Clone, Debug)]
pub struct Outgoing {
    /// Sequence number of the mapping, which grows with each mapping that is sent.
    pub sequence: u64,
    pub mapping: Mapping,
    /// Whether no answer waits for the result.
    pub leased: bool,
    /// A report of the answer for the agent, if the agent wants one.
    pub report: Option<Box<QueryReport>>,
}

/// How many mappings there is room for.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Room for answers that clients wait for.
    pub live: usize,
    /// Room for all other mappings, approximately.
    pub others: usize,
}

impl Default for Room {
    /// Room for as many mappings as a batch takes.
    fn default() -> Self {
        Self {
            live: usize::MAX,
            others: usize::MAX,
        }
    }
}

/// The next mappings to send.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// Mappings to send. Mappings that clients wait for come first.
    pub mappings: Vec<Outgoing>,
    /// Numbers of the revocations that were carried out.
    pub revoked: Vec<u64>,
}

impl Batch {
    /// Whether there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.mappings.is_empty() && self.revoked.is_empty()
    }
}

/// Counters of the sink since the process started.
#[derive(Clone, Debug, Default)]
pub struct SinkStats {
    /// Answers released because each pair was leased or acknowledged. A repetition within
    /// `mapping::repeat::WITHIN` is not counted here.
    pub leased: Count,
    /// Answers held for a result.
    pub held: Count,
    /// Answers released because there was no agent.
    pub agent_away: Count,
    /// Answers released because the agent counted as hung.
    pub agent_hung: Count,
    /// Answers released because too many answers of their endpoint waited to be sent.
    pub queue_full: Count,
    /// Held answers whose result did not come in time.
    pub late: Count,
    pub realised: Count,
    /// Mappings refused, not realised, or without a result.
    pub refused: Count,
    /// Mappings sent again from the table.
    pub replayed: Count,
    pub revocations: Count,
}

/// State of the sink, for `status`.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct SinkStatus {
    /// Pairs that the sink stores to send them again.
    pub kept: usize,
    /// Pairs dropped because there were too many.
    pub dropped: u64,
    pub leases: usize,
    /// Mappings that are not sent yet.
    pub queued: usize,
    /// Mappings without a result yet.
    pub in_flight: usize,
    /// Whether the agent counts as hung.
    pub agent_hung: bool,
}
