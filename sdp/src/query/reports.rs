//! Reports of queries, answers and failures for a Cilium agent that listens.

use std::{net::SocketAddr, time::Instant};

use dns_policy::{
    name::{Fqdn, NameBuf},
    rule::Transport,
};

use super::{
    observe::{Judged, Observer},
    pending::{Asked, Identities},
    stopwatch::Judging,
};
use crate::{
    notice::{Content, Event, Failure, Notice, Times},
    wire::{
        answer::{self, Learned},
        labels, u16_at,
    },
};

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
        let notice = notice(
            (judged.from.client, judged.from.server),
            (judged.from.transport, identities),
            (name, judged.query.qtype),
            times,
            Event::Query,
        );
        self.notices.put(Notice { allowed, ..notice });
    }

    /// Reports that a query that policy allowed gets no answer.
    pub(crate) fn report_failure(&self, asked: &Asked<'_>, failure: Failure) {
        if !self.notices.wants_one() {
            return;
        }
        let times = Times {
            policy_check: asked.policy_check,
            processing: asked.policy_check,
            upstream: asked.waited,
        };
        if let Some(subject) = subject(asked) {
            let notice = notice(
                ends(asked),
                (asked.transport, asked.identities),
                subject,
                times,
                Event::Failed(failure),
            );
            self.notices.put(notice);
        }
    }

    /// Whether an answer is to be read for a report of it, even if it was learned a moment ago.
    pub(crate) fn wants_report(&self) -> bool {
        self.notices.is_wanted()
    }

    /// Sends a report of an answer.
    pub(crate) fn report(&self, report: Option<Notice>) {
        report
            .into_iter()
            .for_each(|report| self.notices.put(report));
    }

    /// The report of an answer, if an agent listens.
    pub(crate) fn answer_report(
        &self,
        asked: &Asked<'_>,
        message: &[u8],
        learned: Option<&Learned>,
    ) -> Option<Notice> {
        if !self.notices.wants_one() {
            return None;
        }
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
            processing: asked.policy_check + began.elapsed(),
            policy_check: asked.policy_check,
            upstream: asked.waited,
        };
        let event = Event::Answer(content);
        Some(notice(
            ends(asked),
            (asked.transport, asked.identities),
            subject(asked)?,
            times,
            event,
        ))
    }

    /// Reports an answer that another client gets too, because it sent the same query.
    pub(crate) fn report_joined(&self, asked: &Asked<'_>, message: &[u8]) {
        if !self.notices.is_wanted() {
            return;
        }
        let learned = answer::read(message).ok().and_then(|read| read.learned);
        if let Some(notice) = self.answer_report(asked, message, learned.as_ref()) {
            self.notices.put(notice);
        }
    }
}

fn notice(
    (client, server): (SocketAddr, SocketAddr),
    (transport, identities): (Transport, Identities),
    (name, qtype): (Fqdn, u16),
    times: Times,
    event: Event,
) -> Notice {
    Notice {
        name,
        qtype,
        client,
        identity: identities.client,
        server,
        server_identity: identities.server,
        transport,
        allowed: true,
        times,
        event,
    }
}

fn ends(asked: &Asked<'_>) -> (SocketAddr, SocketAddr) {
    (asked.client, asked.server)
}

/// Name and type of the question.
fn subject(asked: &Asked<'_>) -> Option<(Fqdn, u16)> {
    let mut name = NameBuf::default();
    labels::read(asked.question, 0, &mut name)?;
    let kind = asked.question.len().checked_sub(4)?;
    Some((name.to_fqdn(), u16_at(asked.question, kind)?))
}
