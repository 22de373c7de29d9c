//! Answers made by the proxy, for queries that are refused and for queries that fail later.

use std::{net::SocketAddr, time::Instant};

use dns_policy::reject_code::RejectCode;
use dns_wire::{Rcode, query::Unfit, reply};

use super::{Proxy, QueryDecision};

use crate::{
    query::{
        observe::{Failure, Judged},
        pending::PendingQuery,
    },
    stats::QueryResult,
};

impl Proxy {
    /// Answers or drops a message that is not a query which can be judged.
    pub(super) fn unfit<'a>(
        &self,
        message: &[u8],
        unfit: Unfit,
        own: &mut Vec<u8>,
    ) -> QueryDecision<'a> {
        let (result, outcome) = match unfit {
            Unfit::Ignore => (QueryResult::Ignored, QueryDecision::Ignore),
            Unfit::Answer(code) => {
                reply::to_unfit(message, code, own);
                (QueryResult::of_unfit(code), QueryDecision::Reply)
            }
        };
        self.stats().queries.inc(result);
        outcome
    }

    /// Refuses a query: the answer is written to `own`.
    pub(super) fn refuse<'a>(
        &self,
        judged: &Judged<'_>,
        why: QueryResult,
        own: &mut Vec<u8>,
    ) -> QueryDecision<'a> {
        let by_policy = matches!(why, QueryResult::DeniedName | QueryResult::DeniedServer);
        let extended = if by_policy {
            reply::EDE_BLOCKED
        } else {
            reply::EDE_PROHIBITED
        };
        let query = judged.query;
        let (code, extended) = match self.config.reject {
            // An unknown EDNS version is answered first: the client must repeat the query with a
            // known version.
            _ if query.edns.as_ref().is_some_and(|e| e.version > 0) => (Rcode::BadVers, None),
            RejectCode::NameError if by_policy => (Rcode::NxDomain, Some(extended)),
            _ => (Rcode::Refused, Some(extended)),
        };
        reply::to_query(query, code, extended, own);
        self.observer.refused(judged, why, code);
        QueryDecision::Reply
    }

    /// Ends a query that failed. `send` sends SERVFAIL to each of its clients; `own` is the buffer
    /// for it.
    pub(crate) fn fail<Q: AsRef<[u8]>>(
        &self,
        query: &mut PendingQuery<Q>,
        (failure, now): (Failure, Instant),
        own: &mut Vec<u8>,
        mut send: impl FnMut(SocketAddr, &[u8]),
    ) {
        self.observer.failed(query, failure, now);
        let question = query.question.as_ref();
        for (client, header) in query.recipients() {
            match failure {
                Failure::Unreachable => reply::unreachable(header, question, own),
                _ => reply::to_pending(header, question, Rcode::ServFail, own),
            }
            send(client, own);
        }
    }
}
