//! The valid answers that a pod received.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::dns::probe::Reply;

/// The answers that a pod received.
#[derive(Clone, Debug, Default)]
pub struct ReceivedAnswers(Arc<Mutex<Vec<Answer>>>);

#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) name: String,
    pub(crate) addresses: Vec<IpAddr>,
    until: Instant,
}

impl ReceivedAnswers {
    /// Records the addresses of an answer until its smallest TTL ends. Answers without addresses
    /// are ignored.
    pub fn note(&self, reply: &Reply) {
        let Some(question) = reply.message.queries.first() else {
            return;
        };
        let ttl = reply.message.answers.iter().map(|record| record.ttl).min();
        let answer = Answer {
            name: question.name().to_ascii().to_ascii_lowercase(),
            addresses: reply.addresses(),
            until: Instant::now() + Duration::from_secs(ttl.unwrap_or(0).into()),
        };
        if !answer.addresses.is_empty() {
            self.0.lock().push(answer);
        }
    }

    /// Removes all answers, because a change of policy gave them another meaning.
    pub fn forget(&self) {
        self.0.lock().clear();
    }

    pub(crate) fn valid(&self, below: &str) -> Vec<Answer> {
        let now = Instant::now();
        let answers = self.0.lock();
        let valid = answers.iter().filter(|answer| {
            answer.until > now && answer.name.trim_end_matches('.').ends_with(below)
        });
        valid.cloned().collect()
    }
}
