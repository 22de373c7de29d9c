//! Records what happens to queries: counters, query log, reports to a Cilium agent, stage times.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use dns_policy::wall_time;
use shared_maps::EndpointId;

use super::{
    pending::{Arrival, Identities},
    stopwatch::Stopwatch,
};
use crate::{
    notice::Notices,
    proxy::stats::{Label as _, QueryResult, Stage, Stats},
    query_log::{End, Entry, QueryLog},
    wire::{Rcode, query::Query},
};

/// The one recorder of all queries. Shared by all workers.
#[derive(Debug, Default)]
pub struct Observer {
    stats: Stats,
    query_log: Option<Arc<QueryLog>>,
    pub(super) notices: Arc<Notices>,
}

/// A query that was decoded, and what is known about its two ends.
#[derive(Clone, Copy)]
pub(crate) struct Judged<'q> {
    pub(crate) query: &'q Query<'q>,
    pub(crate) from: &'q Arrival,
    /// `None` if it was refused before its endpoint was known.
    pub(crate) ends: Option<(EndpointId, Identities)>,
}

impl Judged<'_> {
    /// Entry of the query log.
    fn entry(&self, rule: Option<(String, String)>) -> Entry {
        Entry {
            time: wall_time::now(),
            asked: self.from.now,
            endpoint: self.ends.map(|(id, of)| (id.0, of.client.0)),
            pod: self.from.client.ip(),
            name: self.query.name.as_str().to_owned(),
            qtype: self.query.qtype,
            transport: self.from.transport,
            allowed: true,
            server: self.from.server,
            server_identity: self.ends.map(|(_, of)| of.server.0),
            rule,
            end: End::default(),
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

    pub(crate) fn with_notices(self, notices: Arc<Notices>) -> Self {
        Self { notices, ..self }
    }

    pub(crate) fn with_query_log(self, query_log: Option<Arc<QueryLog>>) -> Self {
        Self { query_log, ..self }
    }

    /// Counters.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Starts to measure the query `message`.
    pub(crate) fn start(&self, message: &[u8]) -> Stopwatch {
        Stopwatch::start(message, self.notices.wants_one())
    }

    /// Policy allowed or denied a query. Returns the duration of the policy check, zero if it was
    /// not measured.
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

    /// A query is sent on, as policy allows. Returns the entry of the query log, if the log wants
    /// this query; `rule` finds the rule that allows it.
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

    /// A query was refused for the reason `result` and answered with `code`.
    pub(crate) fn refused(&self, judged: &Judged<'_>, result: QueryResult, code: Rcode) {
        self.stats.queries.inc(result);
        if let Some(log) = &self.query_log
            && log.takes(false)
        {
            let mut entry = judged.entry(None);
            entry.allowed = false;
            entry.end = End::own(result.text(), code);
            log.submit(Box::new(entry));
        }
    }

    /// An answer had this many addresses more than are learned of one.
    pub(crate) fn addresses_left_out(&self, count: usize) {
        let count = u64::try_from(count).unwrap_or(u64::MAX);
        self.stats.addresses_left_out.add(count);
    }

    /// Ends an entry of the query log.
    pub(crate) fn log(&self, mut entry: Box<Entry>, end: End, now: Instant) {
        if let Some(log) = &self.query_log {
            let took = now.saturating_duration_since(entry.asked);
            entry.end = End { took, ..end };
            log.submit(entry);
        }
    }
}
