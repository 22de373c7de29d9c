//! Reports of queries, answers and failures to a connected Cilium agent.

use std::{net::SocketAddr, time::Instant};

use dns_policy::name::{Fqdn, NameBuf};
use dns_wire::{
    answer::{self, Learned},
    labels, u16_at,
};

use super::{
    observe::{Judged, Observer},
    pending::{Arrival, Identities, PendingQuery},
    stopwatch::Judging,
};
use crate::query_report::{Content, Event, Failure, QueryReport, Times};

impl Observer {
    /// Reports that policy allowed or denied a query.
    pub(super) fn report_query(&self, judged: &Judged<'_>, allowed: bool, judging: &Judging) {
        let Some((_, identities)) = judged.ends else {
            return;
        };
        let times = Times {
            processing: judging.processing,
            policy_check: judging.policy_check,
            ..Times::default()
        };
        let name = judged.query.name.to_fqdn();
        let report = report(
            judged.from,
            identities,
            (name, judged.query.qtype),
            times,
            Event::Query,
        );
        self.reports.put(QueryReport { allowed, ..report });
    }

    /// Reports, for each client, that an allowed query gets no answer.
    pub(super) fn report_failure<Q: AsRef<[u8]>>(
        &self,
        query: &PendingQuery<Q>,
        failure: Failure,
        now: Instant,
    ) {
        for (client, _) in query.recipients() {
            self.report_failure_to(query, client, failure, now);
        }
    }

    /// Reports that a server's answer cannot be decoded.
    pub(crate) fn undecodable<Q: AsRef<[u8]>>(&self, query: &PendingQuery<Q>, now: Instant) {
        self.report_failure_to(query, query.from.client, Failure::Undecodable, now);
    }

    fn report_failure_to<Q: AsRef<[u8]>>(
        &self,
        query: &PendingQuery<Q>,
        client: SocketAddr,
        failure: Failure,
        now: Instant,
    ) {
        if !self.reports.reserve() {
            return;
        }
        let times = Times {
            policy_check: query.policy_check,
            processing: query.policy_check,
            upstream: query.waited(now),
        };
        let report = report_of(query, client, times, Event::Failed(failure));
        self.report(self.made(report));
    }

    /// Releases the reserved place if no report could be made from the message.
    fn made(&self, report: Option<QueryReport>) -> Option<QueryReport> {
        if report.is_none() {
            self.reports.unreserve();
        }
        report
    }

    /// Whether an answer must be parsed for a report, even if it was learned a moment ago.
    pub(crate) fn wants_report(&self) -> bool {
        self.reports.is_wanted()
    }

    /// Queues a report for the agent. `None`: the query is not reported.
    pub(crate) fn report(&self, report: Option<QueryReport>) {
        if let Some(report) = report {
            self.reports.put(report);
        }
    }

    /// The report of an answer that goes to `client`, if an agent is connected.
    pub(crate) fn answer_report<Q: AsRef<[u8]>>(
        &self,
        query: &PendingQuery<Q>,
        client: SocketAddr,
        (message, learned): (&[u8], Option<&Learned>),
        now: Instant,
    ) -> Option<QueryReport> {
        if !self.reports.reserve() {
            return None;
        }
        self.made(report_of_answer(query, client, (message, learned), now))
    }

    /// Reports an answer for the other clients that sent an equal query.
    pub(crate) fn report_joined<Q: AsRef<[u8]>>(
        &self,
        query: &PendingQuery<Q>,
        message: &[u8],
        now: Instant,
    ) {
        for joined in &query.joined {
            if !self.reports.is_wanted() {
                continue;
            }
            let learned = answer::read(message).ok().and_then(|read| read.learned);
            let answer = (message, learned.as_ref());
            self.report(self.answer_report(query, joined.client, answer, now));
        }
    }
}

fn report_of_answer<Q: AsRef<[u8]>>(
    query: &PendingQuery<Q>,
    client: SocketAddr,
    (message, learned): (&[u8], Option<&Learned>),
    now: Instant,
) -> Option<QueryReport> {
    let began = Instant::now();
    let section = answer::section(message)?;
    let mut content = Content {
        rcode: section.rcode,
        addresses: Vec::new(),
        ttl: section.ttl.unwrap_or(0),
        cnames: section.cnames,
        types: section.types,
    };
    if let Some(learned) = learned {
        content.addresses.clone_from(&learned.addresses);
        content.ttl = learned.ttl;
    }
    let times = Times {
        processing: query.policy_check + began.elapsed(),
        policy_check: query.policy_check,
        upstream: query.waited(now),
    };
    report_of(query, client, times, Event::Answer(content))
}

/// The report of an event of a query. `None` if its question cannot be parsed.
fn report_of<Q: AsRef<[u8]>>(
    query: &PendingQuery<Q>,
    client: SocketAddr,
    times: Times,
    event: Event,
) -> Option<QueryReport> {
    let question = query.question.as_ref();
    let mut name = NameBuf::default();
    labels::read(question, 0, &mut name)?;
    let kind = question.len().checked_sub(4)?;
    let subject = (name.to_fqdn(), u16_at(question, kind)?);
    let from = Arrival {
        client,
        ..query.from
    };
    Some(report(&from, query.identities, subject, times, event))
}

fn report(
    from: &Arrival,
    identities: Identities,
    (name, qtype): (Fqdn, u16),
    times: Times,
    event: Event,
) -> QueryReport {
    QueryReport {
        name,
        qtype,
        client: from.client,
        identity: identities.client,
        server: from.server,
        server_identity: identities.server,
        transport: from.transport,
        allowed: true,
        times,
        event,
    }
}
