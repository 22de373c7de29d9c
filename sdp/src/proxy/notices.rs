//! Tells who listens of queries, answers and failures.

use std::time::{Duration, Instant};

use dns_policy::name::{Fqdn, NameBuf};

use super::{Arrival, Asked, Identities, Proxy};
use crate::{
    notice::{Content, Event, Failure, Notice, Times},
    wire::{
        answer::{self, Learned},
        labels,
        query::Query,
        u16_at,
    },
};

impl Proxy {
    /// A query was judged; `began`: when that was begun.
    pub(super) fn notice_query(
        &self,
        query: &Query<'_>,
        (from, identities): (&Arrival, Identities),
        allowed: bool,
        (began, policy_check): (Instant, Duration),
    ) {
        let times = Times {
            processing: began.elapsed(),
            policy_check,
            ..Times::default()
        };
        let name = query.name.to_fqdn();
        let notice = notice(
            (*from, identities),
            (name, query.qtype),
            times,
            Event::Query,
        );
        self.notices.put(Notice { allowed, ..notice });
    }

    /// A query that was allowed will have no answer.
    pub(crate) fn notice_failure(&self, asked: &Asked<'_>, failure: Failure) {
        if !self.notices.wants_one() {
            return;
        }
        let times = Times {
            policy_check: asked.policy_check,
            processing: asked.policy_check,
            upstream: asked.waited,
        };
        if let Some(subject) = subject(asked) {
            let notice = notice(parties(asked), subject, times, Event::Failed(failure));
            self.notices.put(notice);
        }
    }

    /// What there is to say of an answer, if anybody listens.
    pub(super) fn answer_notice(
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
        Some(notice(parties(asked), subject(asked)?, times, event))
    }

    /// An answer goes to another client, too, that had asked the same.
    pub(crate) fn notice_joined(&self, asked: &Asked<'_>, message: &[u8]) {
        if !self.notices.is_wanted() {
            return;
        }
        let learned = answer::read(message).ok().and_then(|read| read.learned);
        if let Some(notice) = self.answer_notice(asked, message, learned.as_ref()) {
            self.notices.put(notice);
        }
    }
}

fn notice(
    (from, identities): (Arrival, Identities),
    (name, qtype): (Fqdn, u16),
    times: Times,
    event: Event,
) -> Notice {
    Notice {
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

fn parties(asked: &Asked<'_>) -> (Arrival, Identities) {
    let arrival = Arrival {
        client: asked.client,
        server: asked.server,
        transport: asked.transport,
    };
    (arrival, asked.identities)
}

/// Name and type of the question.
fn subject(asked: &Asked<'_>) -> Option<(Fqdn, u16)> {
    let mut name = NameBuf::default();
    labels::read(asked.question, 0, &mut name)?;
    let kind = asked.question.len().checked_sub(4)?;
    Some((name.to_fqdn(), u16_at(asked.question, kind)?))
}
