//! The result that is counted for each outcome.

use dns_policy::{
    mapping::{Realised, Refusal},
    verdict::DenyReason,
};
use dns_wire::Rcode;

use crate::stats::{AnswerResult, QueryResult};

impl QueryResult {
    pub(super) fn of_unfit(code: Rcode) -> Self {
        match code {
            Rcode::NotImp => Self::NotImp,
            _ => Self::FormErr,
        }
    }

    pub(super) fn of_denied(reason: DenyReason) -> Self {
        match reason {
            DenyReason::NoRules | DenyReason::NoRulesForPort => Self::DeniedNoRules,
            DenyReason::ServerNotSelected => Self::DeniedServer,
            DenyReason::NameNotAllowed => Self::DeniedName,
        }
    }
}

impl AnswerResult {
    /// The result of an answer that was held.
    pub(crate) fn of(realised: Realised) -> Self {
        match realised {
            Realised::Yes => Self::Realised,
            Realised::No(Refusal::Rejected) => Self::Rejected,
            Realised::No(_) => Self::NotRealised,
            Realised::AgentAway => Self::AgentAway,
        }
    }
}
