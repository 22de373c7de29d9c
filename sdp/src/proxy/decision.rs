//! The decisions of the main path about a query and about an answer.

use dns_policy::mapping::EndpointInstance;
use dns_wire::edns::Edns;

use crate::{query::pending::PendingQuery, stats::AnswerResult};

/// The decision about a query.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "a box would cost an allocation for each query"
)]
pub enum QueryDecision<'a> {
    /// Send the query to its server.
    Forward(PendingQuery<&'a [u8]>),
    /// Send the answer that the proxy has written to `own`.
    Reply,
    /// The endpoint has no rules yet. The query is judged again when the endpoint has rules.
    ///
    /// The datapath sends an endpoint's queries to the proxy only if policy restricts them, so the
    /// rules exist. A Cilium agent sends them to the proxy up to half a second after the endpoint
    /// is ready.
    AwaitRules(EndpointInstance),
    /// Send nothing: the message is no query that can be answered.
    Ignore,
}

/// Whether a query may wait for the rules of its endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RulesWait {
    Allowed,
    /// The query has waited long enough, or there is no room for it.
    Over,
}

/// The decision about an answer.
#[derive(Clone, Debug)]
pub struct Answered {
    pub decision: AnswerDecision,
    /// OPT record of the answer, if it carries an option that must not be passed on.
    pub hop_by_hop: Option<Edns>,
}

/// Whether an answer may go to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerDecision {
    /// Release it now. Once it is sent, it is counted under this result.
    Release(AnswerResult),
    /// Hold it until the callback is called, or until the response max delay ends.
    Hold,
    /// Never release it: the clients get SERVFAIL instead.
    Malformed,
}
