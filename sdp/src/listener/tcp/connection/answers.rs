//! From the server, and from the agent, to the client.

use std::sync::Arc;

use dns_policy::{boot_time::BootTime, mapping::Realised};

use super::{
    super::{
        flight::{Flight, Held},
        upstream::Happened,
    },
    Connection,
};
use crate::{
    proxy::{
        Fate,
        stats::{AnswerResult, Label as _, Stage},
    },
    query_log::End,
    wire::{Header, Rcode, answer, reply, set_id},
};

impl Connection {
    pub(super) fn on_upstream(&mut self, happened: &Happened) {
        match happened {
            Happened::Progress => {}
            Happened::Read => {
                let mut message = std::mem::take(&mut self.message);
                while self.upstream.reader.take(&mut message) {
                    self.count(&message);
                    self.answer(&mut message);
                }
                self.message = message;
            }
            Happened::Lost(error) => {
                tracing::debug!(%error, server = %self.server, "an upstream connection is gone");
                self.send_again();
            }
        }
        // Room may have come for queries that were read before.
        self.take_queries();
    }

    /// The server closed: what it left unanswered is asked once more (RFC 7766, 6.2.4).
    fn send_again(&mut self) {
        for (id, mut flight) in self.waiting.remove_flights(|_| true) {
            if flight.has_begun() {
                // The client cannot be told but by closing.
                self.shared.proxy.stats().in_flight.down();
                self.log(&mut flight.logged, End::unanswered("cut"));
                self.ended = true;
            } else if flight.resent {
                self.fail(flight);
            } else {
                flight.resent = true;
                self.send(id, flight);
            }
        }
    }

    fn answer(&mut self, message: &mut Vec<u8>) {
        let proxy = Arc::clone(&self.shared.proxy);
        let stats = proxy.stats();
        let asked = Header::read(message).map(|h| h.id).filter(|id| {
            self.waiting
                .flight(*id)
                .is_some_and(|f| f.is_answered_by(message))
        });
        if let Some(id) = asked
            && self.transfer(id, message)
        {
            return;
        }
        let Some(mut flight) = asked.and_then(|id| self.waiting.remove_flight(id)) else {
            stats.answers.inc(AnswerResult::Unexpected);
            return;
        };
        self.last_activity = self.now;
        stats.in_flight.down();
        let took = self.now.duration_since(flight.sent_at);
        stats.stages.observe(Stage::Upstream, took);
        set_id(message, flight.kept.id);
        // Of before the sink is asked: what changes while it decides counts.
        let version = proxy.sink().leases_version();
        let now = BootTime::now();
        let (print, is_leased) = {
            let repeats = self.shared.repeats.lock();
            let print = repeats.print(flight.endpoint, self.server, message);
            (print, repeats.is_leased(print, version, now))
        };
        if is_leased && !proxy.observer().wants_report() {
            let result = AnswerResult::Released;
            stats.answers.inc(result);
            stats.stages.observe(Stage::Total, took);
            self.log(&mut flight.logged, End::sent(result.text(), message));
            self.out.push(message);
            return;
        }
        let asked = flight.asked((self.client, self.server), self.now);
        let mut awaited = None;
        let results = &mut self.results;
        let answered = proxy.answer(&asked, message, now, || {
            let (result, callback) = results.expect();
            awaited = Some(result);
            callback
        });
        if let Some(edns) = &answered.hop_by_hop {
            edns.strip_keepalive(message);
        }
        match (answered.fate, awaited) {
            (Fate::Hold, Some(result)) => {
                let held = Held {
                    result,
                    message: message.clone(),
                    logged: flight.logged.take(),
                    asked: flight.sent_at,
                    since: self.now,
                };
                self.waiting.add_held(held);
                stats.held.up();
            }
            (Fate::Release(result), _) => {
                if result == AnswerResult::Released && answered.hop_by_hop.is_none() {
                    self.shared.repeats.lock().leased(print, version, now);
                }
                stats.answers.inc(result);
                stats.stages.observe(Stage::Total, took);
                self.log(&mut flight.logged, End::sent(result.text(), message));
                self.out.push(message);
            }
            (Fate::Malformed, _) | (Fate::Hold, None) => {
                stats.answers.inc(AnswerResult::Malformed);
                let result = AnswerResult::Malformed.text();
                self.log(&mut flight.logged, End::own(result, Rcode::ServFail));
                self.servfail(&flight);
            }
        }
    }

    /// Passes a message of a zone transfer on, if the query asked for one. It teaches
    /// nothing, and so none is held: the messages must stay in order.
    fn transfer(&mut self, id: u16, message: &mut Vec<u8>) -> bool {
        let Some(flight) = self.waiting.flight_mut(id) else {
            return false;
        };
        let Some(transfer) = &mut flight.transfer else {
            return false;
        };
        let is_over = transfer.take(message);
        flight.sent_at = self.now;
        flight.deadline = self.now + self.shared.proxy.config().timeout;
        self.last_activity = self.now;
        set_id(message, flight.kept.id);
        let stats = self.shared.proxy.stats();
        if is_over {
            if let Some(mut flight) = self.waiting.remove_flight(id) {
                let result = AnswerResult::Released.text();
                self.log(&mut flight.logged, End::sent(result, message));
            }
            stats.in_flight.down();
        }
        stats.answers.inc(AnswerResult::Released);
        if let Ok(reading) = answer::read(message)
            && let Some(edns) = reading.hop_by_hop
        {
            edns.strip_keepalive(message);
        }
        self.out.push(message);
        true
    }

    pub(super) fn release(&mut self, key: u64, realised: Realised) {
        if let Some(mut held) = self.waiting.remove_held(key) {
            let result = AnswerResult::of(realised);
            if result == AnswerResult::Rejected {
                reply::to_unfit(&held.message, Rcode::ServFail, &mut self.own);
                held.message.clone_from(&self.own);
            }
            self.send_held(held, result);
        }
        self.take_queries();
    }

    pub(super) fn send_held(&mut self, mut held: Held, result: AnswerResult) {
        let stats = self.shared.proxy.stats();
        stats.held.down();
        let waited = self.now.duration_since(held.since);
        stats.stages.observe(Stage::Dataplane, waited);
        let took = self.now.duration_since(held.asked);
        stats.stages.observe(Stage::Total, took);
        stats.answers.inc(result);
        let end = End::sent(result.text(), &held.message).held(waited);
        self.log(&mut held.logged, end);
        self.out.push(&held.message);
        self.last_activity = self.now;
    }

    fn servfail(&mut self, flight: &Flight) {
        let code = Rcode::ServFail;
        reply::to_kept(flight.kept, &flight.question, code, &mut self.own);
        self.out.push(&self.own);
    }
}
