//! Records the events of queries: counters, query log, reports to a Cilium agent, stage times.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use dns_policy::wall_time;
use dns_wire::{Rcode, query::Query};
use shared_maps::EndpointId;

use super::{
    pending::{Arrival, HeldAnswer, Identities, PendingQuery},
    stopwatch::Stopwatch,
};
use crate::{
    query_log::{Entry, QueryEnd, QueryLog},
    query_report::{self, QueryReports},
    stats::{AnswerResult, Label as _, QueryResult, Stage, Stats},
};

/// The recorder of all queries, which all workers share.
#[derive(Debug, Default)]
pub(crate) struct Observer {
    stats: Stats,
    query_log: Option<Arc<QueryLog>>,
    pub(super) reports: Arc<QueryReports>,
}

/// A decoded query, with the data about its two ends.
#[derive(Clone, Copy)]
pub(crate) struct Judged<'q> {
    pub(crate) query: &'q Query<'q>,
    pub(crate) from: &'q Arrival,
    /// `None` if the query was refused before its endpoint was found.
    pub(crate) ends: Option<(EndpointId, Identities)>,
}

/// Why the clients of a query get SERVFAIL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// Too many queries are in flight.
    Overload,
    /// The query could not be sent.
    NotSent,
    /// The network or the server reported that the server cannot be reached.
    Unreachable,
    /// The server's answer cannot be decoded.
    Malformed,
}

impl Failure {
    /// The failure in a report to the agent. `None` if the query was already reported.
    fn reported(self) -> Option<query_report::Failure> {
        match self {
            Self::Overload => Some(query_report::Failure::Overload),
            Self::NotSent | Self::Unreachable => Some(query_report::Failure::Unreachable),
            // `Observer::undecodable` has reported it.
            Self::Malformed => None,
        }
    }
}

impl Judged<'_> {
    /// Entry of the query log.
    fn entry(&self, rule: Option<(String, String)>) -> Entry {
        Entry {
            time: wall_time::now(),
            asked: self.from.at,
            endpoint: self.ends.map(|(id, of)| (id.0, of.client.0)),
            pod: self.from.client.ip(),
            name: self.query.name.as_str().to_owned(),
            qtype: self.query.qtype,
            transport: self.from.transport,
            allowed: true,
            server: self.from.server,
            server_identity: self.ends.map(|(_, of)| of.server.0),
            rule,
            end: QueryEnd::default(),
        }
    }
}

impl Observer {
    pub(crate) fn new(stats: Stats) -> Self {
        Self {
            stats,
            ..Self::default()
        }
    }

    pub(crate) fn with_reports(self, reports: Arc<QueryReports>) -> Self {
        Self { reports, ..self }
    }

    pub(crate) fn with_query_log(self, query_log: Option<Arc<QueryLog>>) -> Self {
        Self { query_log, ..self }
    }

    pub(crate) fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Starts to measure the query `message`.
    pub(crate) fn start(&self, message: &[u8]) -> Stopwatch {
        Stopwatch::start(message, self.reports.reserve())
    }

    /// Notes that the query will be judged again later. Its report is sent then.
    pub(crate) fn postponed(&self, watch: &Stopwatch) {
        if watch.is_reported() {
            self.reports.unreserve();
        }
    }

    /// Records that policy allowed or denied a query. Returns the duration of the policy check;
    /// zero if it was not measured.
    pub(crate) fn checked(
        &self,
        judged: &Judged<'_>,
        is_allowed: bool,
        watch: &Stopwatch,
    ) -> Duration {
        let Some(judging) = watch.stop() else {
            return Duration::ZERO;
        };
        if judging.is_sample {
            let (processing, check) = match is_allowed {
                true => (Stage::Processing, Stage::PolicyCheck),
                false => (Stage::ProcessingDenied, Stage::PolicyCheckDenied),
            };
            self.stats.stages.observe(processing, judging.processing);
            self.stats.stages.observe(check, judging.policy_check);
        }
        if judging.is_reported {
            self.report_query(judged, is_allowed, &judging);
        }
        judging.policy_check
    }

    /// Records that a query is sent on because policy allows it. Returns the entry of the query
    /// log, if the log wants this query. `rule` finds the rule that allows the query.
    pub(crate) fn allowed(
        &self,
        judged: &Judged<'_>,
        rule: impl FnOnce() -> Option<(String, String)>,
    ) -> Option<Box<Entry>> {
        self.stats.queries.inc(QueryResult::Forwarded);
        let log = self.query_log.as_ref()?;
        let is_wanted = log.takes(true);
        is_wanted.then(|| Box::new(judged.entry(rule())))
    }

    /// Records that a query was refused for the reason `result` and answered with `code`.
    pub(crate) fn refused(&self, judged: &Judged<'_>, result: QueryResult, code: Rcode) {
        self.stats.queries.inc(result);
        if let Some(log) = &self.query_log
            && log.takes(false)
        {
            let mut entry = judged.entry(None);
            entry.allowed = false;
            entry.end = QueryEnd::own(result.text(), code);
            log.submit(Box::new(entry));
        }
    }

    /// Records that an answer had `count` more addresses than are learned from one answer.
    pub(crate) fn addresses_left_out(&self, count: usize) {
        let count = u64::try_from(count).unwrap_or(u64::MAX);
        self.stats.addresses_left_out.add(count);
    }

    /// Records that a query got a place in flight and goes to its server.
    pub(crate) fn forwarded(&self) {
        self.stats.in_flight.up();
    }

    /// Records that a query waits for the answer to an equal query in flight.
    pub(crate) fn joined(&self) {
        self.stats.joined.add(1);
    }

    /// Records that the clients of a query get SERVFAIL.
    pub(crate) fn failed<Q: AsRef<[u8]>>(
        &self,
        query: &mut PendingQuery<Q>,
        failure: Failure,
        now: Instant,
    ) {
        let (queries, answers) = (&self.stats.queries, &self.stats.answers);
        let result = match failure {
            Failure::Malformed => {
                answers.inc(AnswerResult::Malformed);
                AnswerResult::Malformed.text()
            }
            Failure::Overload => {
                queries.inc(QueryResult::Shed);
                QueryResult::Shed.text()
            }
            Failure::NotSent | Failure::Unreachable => {
                queries.inc(QueryResult::UpstreamError);
                QueryResult::UpstreamError.text()
            }
        };
        // An answer, even a malformed one, ended the flight.
        if query.sent_at.is_some() && failure != Failure::Malformed {
            self.stats.in_flight.down();
        }
        if let Some(reported) = failure.reported() {
            self.report_failure(query, reported, now);
        }
        self.log(query, QueryEnd::own(result, Rcode::ServFail), now);
    }

    /// Records that the server did not answer in time. The clients get nothing.
    pub(crate) fn timed_out<Q: AsRef<[u8]>>(&self, query: &mut PendingQuery<Q>, now: Instant) {
        self.stats.upstream_timeouts.add(1);
        let waited = query.waited(now);
        self.stats.stages.observe(Stage::TotalTimeout, waited);
        self.stalled(query, now);
    }

    /// Records that the server did not finish its answer, a zone transfer, in time.
    pub(crate) fn stalled<Q: AsRef<[u8]>>(&self, query: &mut PendingQuery<Q>, now: Instant) {
        self.stats.in_flight.down();
        self.report_failure(query, query_report::Failure::Timeout, now);
        self.log(query, QueryEnd::unanswered("timeout"), now);
    }

    /// Records that the process or the client's connection ended before the server answered.
    pub(crate) fn cut<Q>(&self, query: &mut PendingQuery<Q>, now: Instant) {
        if query.sent_at.is_some() {
            self.stats.in_flight.down();
        }
        self.log(query, QueryEnd::unanswered("cut"), now);
    }

    /// Records that the process or the client's connection ended while an answer was held.
    pub(crate) fn cut_held(&self, answer: &mut HeldAnswer, now: Instant) {
        self.stats.held.down();
        self.log(&mut answer.query, QueryEnd::unanswered("cut"), now);
    }

    /// Records that the server's answer arrived: the query is no longer in flight.
    pub(crate) fn answered<Q>(&self, query: &PendingQuery<Q>, now: Instant) {
        self.stats.in_flight.down();
        let waited = query.waited(now);
        self.stats.stages.observe(Stage::Upstream, waited);
    }

    /// Records that one message of a zone transfer goes to the client.
    pub(crate) fn transferred(&self) {
        self.stats.answers.inc(AnswerResult::Released);
    }

    /// Records that the last message of a zone transfer, `message`, goes to the client.
    pub(crate) fn transfer_ended<Q>(
        &self,
        query: &mut PendingQuery<Q>,
        message: &[u8],
        now: Instant,
    ) {
        self.stats.in_flight.down();
        let end = QueryEnd::sent(AnswerResult::Released.text(), message);
        self.log(query, end, now);
    }

    /// Records that an answer is held from now on.
    pub(crate) fn held(&self) {
        self.stats.held.up();
    }

    /// Records that an answer that was not held goes to its clients.
    pub(crate) fn released<Q>(
        &self,
        query: &mut PendingQuery<Q>,
        message: &[u8],
        result: AnswerResult,
        now: Instant,
    ) {
        self.sent(query, result, QueryEnd::sent(result.text(), message), now);
    }

    /// Records that a held answer goes to its clients.
    pub(crate) fn released_held(
        &self,
        answer: &mut HeldAnswer,
        result: AnswerResult,
        now: Instant,
    ) {
        self.stats.held.down();
        let held = now.saturating_duration_since(answer.since);
        self.stats.stages.observe(Stage::Dataplane, held);
        let end = QueryEnd::sent(result.text(), &answer.message).held(held);
        self.sent(&mut answer.query, result, end, now);
    }

    fn sent<Q>(
        &self,
        query: &mut PendingQuery<Q>,
        result: AnswerResult,
        end: QueryEnd,
        now: Instant,
    ) {
        let waited = query.waited(now);
        self.stats.stages.observe(Stage::Total, waited);
        let answers = u64::try_from(1 + query.joined.len()).unwrap_or(1);
        self.stats.answers.add(result, answers);
        self.log(query, end, now);
    }

    /// Ends the entries of the query log.
    fn log<Q>(&self, query: &mut PendingQuery<Q>, end: QueryEnd, now: Instant) {
        let Some(log) = &self.query_log else {
            return;
        };
        for mut entry in query.take_entries() {
            let took = now.saturating_duration_since(entry.asked);
            entry.end = QueryEnd { took, ..end };
            log.submit(entry);
        }
    }
}
