//! The main path from a query to its answer, without sockets and clocks.

mod config;
mod decision;
mod ends;
mod refuse;
mod results;

use std::{sync::Arc, time::Instant};

use dns_policy::{
    boot_time::BootTime,
    mapping::Mapping,
    name::NameBuf,
    table::{PolicyHandle, Question},
    verdict::{DenyReason, Verdict},
};
use shared_maps::{EndpointId, IdentityId};

pub use self::{
    config::ProxyConfig,
    decision::{AnswerDecision, Answered, QueryDecision, RulesWait},
};
use dns_wire::{answer, edns::Edns, labels, query::Query, reply::QueryHeader};

use crate::{
    mapping::{MappingSink, OnRealised, Release},
    query::{
        observe::{Judged, Observer},
        pending::{Arrival, PendingQuery},
    },
    query_log::QueryLog,
    query_report::QueryReports,
    resolve::{LookupCache, Resolver},
    stats::{AnswerResult, QueryResult, Stats},
};

/// Judges queries and learns from answers. Shared by all workers.
pub struct Proxy {
    config: ProxyConfig,
    resolver: Arc<dyn Resolver>,
    policy: Arc<PolicyHandle>,
    sink: Arc<dyn MappingSink>,
    observer: Observer,
}

impl Proxy {
    /// A proxy without a query log and without reports.
    pub fn new(
        config: ProxyConfig,
        resolver: Arc<dyn Resolver>,
        policy: Arc<PolicyHandle>,
        sink: Arc<dyn MappingSink>,
        stats: Stats,
    ) -> Self {
        Self {
            config,
            resolver,
            policy,
            sink,
            observer: Observer::new(stats),
        }
    }

    /// Reports every query and answer to `reports` while an agent is connected there.
    #[must_use]
    pub fn with_reports(self, reports: Arc<QueryReports>) -> Self {
        let observer = self.observer.with_reports(reports);
        Self { observer, ..self }
    }

    #[must_use]
    pub fn with_query_log(self, query_log: Option<Arc<QueryLog>>) -> Self {
        let observer = self.observer.with_query_log(query_log);
        Self { observer, ..self }
    }

    /// Judges a message from a client: whether it may go to its server.
    ///
    /// An answer made by the proxy is written to `own`.
    pub fn query<'a>(
        &self,
        message: &'a [u8],
        from: &Arrival,
        rules_wait: RulesWait,
        own: &mut Vec<u8>,
    ) -> QueryDecision<'a> {
        self.query_of_batch(
            message,
            from,
            (&mut LookupCache::default(), rules_wait),
            own,
        )
    }

    /// Whether the endpoint has rules.
    pub fn has_rules(&self, endpoint: EndpointId) -> bool {
        self.policy.load().has_rules(endpoint)
    }

    /// Like [`Self::query`], for one of several queries that arrived together.
    pub fn query_of_batch<'a>(
        &self,
        message: &'a [u8],
        from: &Arrival,
        (lookups, rules_wait): (&mut LookupCache, RulesWait),
        own: &mut Vec<u8>,
    ) -> QueryDecision<'a> {
        let mut watch = self.observer.start(message);
        let query = match Query::decode(message) {
            Ok(query) => query,
            Err(unfit) => return self.unfit(message, unfit, own),
        };
        let judged = Judged {
            query: &query,
            from,
            ends: None,
        };
        let (endpoint, identities) = match self.ends(from, lookups) {
            Ok(ends) => ends,
            Err(why) => return self.refuse(&judged, why, own),
        };
        let name = query.name.as_str();
        let question = question(from, endpoint.id, identities.server, name);
        watch.check_begins();
        let table = self.policy.load();
        let verdict = table.check(&question);
        if verdict == Verdict::Deny(DenyReason::NoRules) && rules_wait == RulesWait::Allowed {
            self.observer.postponed(&watch);
            return QueryDecision::AwaitRules(endpoint);
        }
        let judged = Judged {
            ends: Some((endpoint.id, identities)),
            ..judged
        };
        let is_allowed = verdict == Verdict::Allow;
        let policy_check = self.observer.checked(&judged, is_allowed, &watch);
        if let Verdict::Deny(reason) = verdict {
            return self.refuse(&judged, QueryResult::of_denied(reason), own);
        }
        let logged = self.observer.allowed(&judged, || table.matched(&question));
        QueryDecision::Forward(PendingQuery {
            from: *from,
            header: QueryHeader {
                id: query.header.id,
                flags: query.header.flags,
                edns: query.edns.as_ref().map(|e| e.dnssec_ok),
            },
            question: query.question(),
            hop_by_hop: query.edns.filter(Edns::has_keepalive),
            endpoint,
            identities,
            source: self.source(from.client, identities.server),
            policy_check,
            sent_at: None,
            logged,
            joined: Vec::new(),
        })
    }

    /// Learns from a server's answer to a query that was sent on, and decides whether the answer
    /// may be released.
    ///
    /// `on_realised` is made only if there is something to learn, and called only if the answer has
    /// to be held.
    pub fn answer<Q: AsRef<[u8]>>(
        &self,
        query: &PendingQuery<Q>,
        message: &[u8],
        now: (Instant, BootTime),
        on_realised: impl FnOnce() -> OnRealised,
    ) -> Answered {
        let answered = self.learn(query, message, now, on_realised);
        self.observer.report_joined(query, message, now.0);
        answered
    }

    fn learn<Q: AsRef<[u8]>>(
        &self,
        query: &PendingQuery<Q>,
        message: &[u8],
        (now, seen_at): (Instant, BootTime),
        on_realised: impl FnOnce() -> OnRealised,
    ) -> Answered {
        let Ok(reading) = answer::read(message) else {
            self.observer.undecodable(query, now);
            return Answered {
                decision: AnswerDecision::Malformed,
                hop_by_hop: None,
            };
        };
        let mut name = NameBuf::default();
        let answer = (message, reading.learned.as_ref());
        let client = query.from.client;
        let report = self.observer.answer_report(query, client, answer, now);
        let decision = match reading.learned {
            Some(learned) if labels::read(query.question.as_ref(), 0, &mut name).is_some() => {
                let left_out = learned.left_out;
                if left_out > 0 {
                    self.observer.addresses_left_out(left_out);
                }
                let mapping = Mapping {
                    endpoint: query.endpoint,
                    name: name.to_fqdn(),
                    addresses: learned.addresses,
                    ttl: learned.ttl,
                    seen_at,
                    rcode: 0,
                    server: query.from.server,
                    transport: query.from.transport,
                    replayed: false,
                };
                let report = report.map(Box::new);
                match self.sink.learn_reported(mapping, report, on_realised()) {
                    Release::Leased => AnswerDecision::Release(AnswerResult::Released),
                    Release::AgentAway => AnswerDecision::Release(AnswerResult::AgentAway),
                    Release::Held => AnswerDecision::Hold,
                }
            }
            _ => {
                self.observer.report(report);
                AnswerDecision::Release(AnswerResult::Released)
            }
        };
        Answered {
            decision,
            hop_by_hop: reading.hop_by_hop,
        }
    }

    pub fn config(&self) -> &ProxyConfig {
        &self.config
    }

    pub fn stats(&self) -> &Stats {
        self.observer.stats()
    }

    /// Records the steps of queries.
    pub(crate) fn observer(&self) -> &Observer {
        &self.observer
    }

    /// Resolves addresses into endpoints and identities.
    pub fn resolver(&self) -> &dyn Resolver {
        &*self.resolver
    }

    pub fn policy(&self) -> &PolicyHandle {
        &self.policy
    }

    pub fn sink(&self) -> &dyn MappingSink {
        &*self.sink
    }
}

/// The question to the policy table about a query for `name`.
#[inline]
fn question<'q>(
    from: &Arrival,
    endpoint: EndpointId,
    server: IdentityId,
    name: &'q str,
) -> Question<'q> {
    Question {
        endpoint,
        port: from.server.port(),
        transport: from.transport,
        server,
        address: from.server.ip(),
        name,
    }
}
