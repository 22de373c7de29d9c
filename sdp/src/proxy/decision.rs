//! What the main path decides about a query and about an answer.

use dns_policy::mapping::EndpointInstance;

use crate::{query::pending::PendingQuery, stats::AnswerResult, wire::edns::Edns};

/// The decision about a query.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "a box would cost an allocation for each query"
)]
pub enum QueryDecision<'a> {
    /// Send it on.
    Forward(PendingQuery<&'a [u8]>),
    /// Send our own answer.
    Reply,
    /// The endpoint has no rules yet: judge the query again when it has some. The datapath
    /// sends an endpoint's queries here because policy restricts them, so its rules exist, and a
    /// Cilium agent sends them to the proxy up to half a second after the endpoint is ready.
    AwaitRules(EndpointInstance),
    /// Drop it.
    Ignore,
}

/// Whether a query may wait for the rules of its endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RulesWait {
    /// It may.
    Allowed,
    /// It has waited long enough, or there is no room for it.
    Over,
}

/// The decision about an answer.
#[derive(Clone, Debug)]
pub struct Answered {
    /// Release, hold or replace.
    pub decision: AnswerDecision,
    /// Its OPT record, if it carries an option that must not be passed on.
    pub hop_by_hop: Option<Edns>,
}

/// Whether an answer may go to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerDecision {
    /// Now; to be counted as this once sent.
    Release(AnswerResult),
    /// When the callback was called, or after the response max delay.
    Hold,
    /// Never: SERVFAIL instead.
    Malformed,
}
