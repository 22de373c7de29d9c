//! Handles answers from the server and results from the agent, for the client.

use std::sync::Arc;

use dns_policy::{boot_time::BootTime, mapping::Realised};
use dns_wire::{Header, answer, set_id};

use super::{
    super::{
        flight::{AwaitedAnswer, Flight},
        links::{Loss, Via},
        upstream::UpstreamEvent,
    },
    Connection,
};
use crate::{
    proxy::{AnswerDecision, Proxy},
    query::{
        observe::Failure,
        pending::{HeldAnswer, PendingQuery},
    },
    stats::AnswerResult,
};

impl Connection {
    pub(super) fn on_upstream(&mut self, via: Via, happened: &UpstreamEvent) {
        match happened {
            UpstreamEvent::Progress => {}
            UpstreamEvent::Read => {
                let mut message = std::mem::take(&mut self.scratch.message);
                while self.links.take(via, &mut message) {
                    self.turn.count(&message);
                    self.answer(via, &mut message);
                }
                self.scratch.message = message;
            }
            UpstreamEvent::Lost(error) => {
                tracing::debug!(%error, server = %self.server, "connection to the server ended");
                self.send_again(via);
            }
        }
        // There may be room for queries that were already read.
        self.take_queries();
    }

    /// After the server closed a connection, sends its unanswered queries again on a new one
    /// (RFC 7766, 6.2.4). If the closed connection was new and brought no answer, this happens only
    /// once for each query.
    fn send_again(&mut self, via: Via) {
        let loss = self.links.lost(via);
        for (id, mut flight) in self.waiting.remove_flights(|flight| flight.via == via) {
            if flight.has_begun() {
                // Only closing the connection shows the client that its answers are missing.
                let observer = self.shared.proxy.observer();
                observer.cut(&mut flight.query, self.now);
                self.client.ended = true;
            } else if loss == Loss::Usual {
                self.send(id, flight);
            } else if flight.resent {
                self.fail(&mut flight.query, Failure::Unreachable);
            } else {
                flight.resent = true;
                self.send(id, flight);
            }
        }
    }

    fn answer(&mut self, via: Via, message: &mut Vec<u8>) {
        let proxy = Arc::clone(&self.shared.proxy);
        let observer = proxy.observer();
        let asked = self.answered_by(via, message);
        if let Some(id) = asked
            && self.transfer(id, message)
        {
            return;
        }
        let Some(Flight { mut query, .. }) = asked.and_then(|id| self.waiting.remove_flight(id))
        else {
            self.unexpected(via, message);
            return;
        };
        self.links.answered(via, None);
        self.client.last_activity = self.now;
        observer.answered(&query, self.now);
        set_id(message, query.header.id);
        // The version is read before the sink decides, so that a change in between is noticed.
        let version = proxy.sink().leases_version();
        let now = BootTime::now();
        let (print, is_leased) = {
            let repeats = self.shared.repeats.lock();
            let print = repeats.print(query.endpoint, self.server, message);
            (print, repeats.is_leased(print, version, now))
        };
        if is_leased && !observer.wants_report() {
            observer.released(&mut query, message, AnswerResult::Released, self.now);
            self.client.out.push(message);
            return;
        }
        if self.learn(&proxy, via, (query, message), now) {
            self.shared.repeats.lock().leased(print, version, now);
        }
    }

    /// The id of the query that a message answers.
    #[inline]
    fn answered_by(&self, via: Via, message: &[u8]) -> Option<u16> {
        let id = Header::read(message).map(|header| header.id)?;
        let flight = self.waiting.flight(id)?;
        (flight.via == via && flight.is_answered_by(message)).then_some(id)
    }

    /// Counts a message that answers neither a query of this client nor one of an earlier client.
    fn unexpected(&mut self, via: Via, message: &[u8]) {
        let id = Header::read(message).map(|header| header.id);
        if !id.is_some_and(|id| self.links.ends_late(via, id)) {
            let stats = self.shared.proxy.stats();
            stats.answers.inc(AnswerResult::Unexpected);
        }
    }

    /// Learns from one answer, and releases or holds it. Returns whether the agent has leased it
    /// and the client got it unchanged.
    #[inline]
    fn learn(
        &mut self,
        proxy: &Proxy,
        via: Via,
        (mut query, message): (PendingQuery<Vec<u8>>, &mut Vec<u8>),
        now: BootTime,
    ) -> bool {
        let observer = proxy.observer();
        let mut awaited = None;
        let results = &mut self.results;
        let answered = proxy.answer(&query, message, (self.now, now), || {
            let (result, callback) = results.expect();
            awaited = Some(result);
            callback
        });
        if let Some(edns) = &answered.hop_by_hop {
            self.links.answered(via, edns.keepalive());
            edns.strip_keepalive(message);
        }
        match (answered.decision, awaited) {
            (AnswerDecision::Hold, Some(result)) => {
                let answer = HeldAnswer {
                    query: query.map_question(drop),
                    message: message.clone(),
                    since: self.now,
                };
                self.waiting.add_held(AwaitedAnswer { result, answer });
                observer.held();
                false
            }
            (AnswerDecision::Release(result), _) => {
                observer.released(&mut query, message, result, self.now);
                self.client.out.push(message);
                result == AnswerResult::Released && answered.hop_by_hop.is_none()
            }
            (AnswerDecision::Malformed, _) | (AnswerDecision::Hold, None) => {
                self.fail(&mut query, Failure::Malformed);
                false
            }
        }
    }

    /// Sends a message of a zone transfer to the client, if the query requested one. The proxy
    /// learns nothing from it and never holds it, because the messages must stay in order.
    fn transfer(&mut self, id: u16, message: &mut Vec<u8>) -> bool {
        let Some(flight) = self.waiting.flight_mut(id) else {
            return false;
        };
        let Some(transfer) = &mut flight.transfer else {
            return false;
        };
        let is_over = transfer.take(message);
        flight.query.sent_at = Some(self.now);
        flight.deadline = self.now + self.shared.proxy.config().timeout;
        self.client.last_activity = self.now;
        set_id(message, flight.query.header.id);
        let observer = self.shared.proxy.observer();
        if is_over && let Some(mut flight) = self.waiting.remove_flight(id) {
            observer.transfer_ended(&mut flight.query, message, self.now);
        }
        observer.transferred();
        if let Ok(reading) = answer::read(message)
            && let Some(edns) = reading.hop_by_hop
        {
            edns.strip_keepalive(message);
        }
        self.client.out.push(message);
        true
    }

    pub(super) fn release(&mut self, key: u64, realised: Realised) {
        if let Some(mut held) = self.waiting.remove_held(key) {
            let result = held.answer.settle(realised);
            self.send_held(held.answer, result);
        }
        self.take_queries();
    }

    pub(super) fn send_held(&mut self, mut answer: HeldAnswer, result: AnswerResult) {
        let observer = self.shared.proxy.observer();
        observer.released_held(&mut answer, result, self.now);
        self.client.out.push(&answer.message);
        self.client.last_activity = self.now;
    }
}
