//! Queries of one connection that wait for their server, and then for the agent.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use dns_wire::{answer, transfer::Transfer};
use foldhash::quality::RandomState;
use limits::quota::Permit;

use super::{links::Via, results::PendingResult};
use crate::query::pending::{HeldAnswer, PendingQuery};

/// A query that waits for its server's answer.
pub(super) struct Flight {
    pub(super) query: PendingQuery<Vec<u8>>,
    /// The message as sent to the server. It is sent again if the server closes the connection.
    pub(super) message: Vec<u8>,
    /// Time at which the query is given up.
    pub(super) deadline: Instant,
    pub(super) resent: bool,
    /// The connection on which it was sent.
    pub(super) via: Via,
    /// State of a zone transfer, whose answer has several messages; `None` for other queries.
    pub(super) transfer: Option<Transfer>,
    /// The query's unit of the limit on queries in flight.
    pub(super) _permit: Permit,
}

impl Flight {
    pub(super) fn is_answered_by(&self, message: &[u8]) -> bool {
        answer::answers_in_any_case(message, &self.query.question)
            || self.transfer.is_some_and(|t| t.continues(message))
    }

    fn bytes(&self) -> usize {
        self.message.len() + self.query.question.len()
    }

    /// Whether the client has got part of its answer.
    pub(super) fn has_begun(&self) -> bool {
        self.transfer.is_some_and(Transfer::has_begun)
    }
}

/// A held answer with its pending result from the agent.
pub(super) struct AwaitedAnswer {
    pub(super) result: PendingResult,
    pub(super) answer: HeldAnswer,
}

/// All waiting queries and answers of one connection, with the bytes that they use.
#[derive(Default)]
pub(super) struct Waiting {
    flights: HashMap<u16, Flight, RandomState>,
    held: HashMap<u64, AwaitedAnswer, RandomState>,
    /// Number of queries in flight on the lent connection.
    lent: usize,
    asked_bytes: usize,
    held_bytes: usize,
}

impl Waiting {
    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of queries in flight and held answers.
    pub(super) fn len(&self) -> usize {
        self.flights.len() + self.held.len()
    }

    /// Bytes of queries in flight.
    pub(super) fn asked_bytes(&self) -> usize {
        self.asked_bytes
    }

    pub(super) fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Whether a query in flight uses the lent connection.
    pub(super) fn uses_lent(&self) -> bool {
        self.lent > 0
    }

    /// Ids of the queries in flight on the lent connection.
    pub(super) fn lent_ids(&self) -> impl Iterator<Item = u16> {
        let lent = self.flights.iter().filter(|(_, f)| f.via == Via::Lent);
        lent.map(|(id, _)| *id)
    }

    /// Whether a query in flight has this id.
    pub(super) fn has(&self, id: u16) -> bool {
        self.flights.contains_key(&id)
    }

    pub(super) fn flight(&self, id: u16) -> Option<&Flight> {
        self.flights.get(&id)
    }

    pub(super) fn flight_mut(&mut self, id: u16) -> Option<&mut Flight> {
        self.flights.get_mut(&id)
    }

    /// Adds a query in flight under an unused id.
    pub(super) fn add_flight(&mut self, id: u16, flight: Flight) {
        self.asked_bytes += flight.bytes();
        self.lent += usize::from(flight.via == Via::Lent);
        self.flights.insert(id, flight);
    }

    pub(super) fn remove_flight(&mut self, id: u16) -> Option<Flight> {
        let flight = self.flights.remove(&id)?;
        self.asked_bytes -= flight.bytes();
        self.lent -= usize::from(flight.via == Via::Lent);
        Some(flight)
    }

    /// Removes the queries in flight that `over` accepts.
    pub(super) fn remove_flights(&mut self, over: impl Fn(&Flight) -> bool) -> Vec<(u16, Flight)> {
        let removed: Vec<_> = self.flights.extract_if(|_, flight| over(flight)).collect();
        self.asked_bytes -= removed.iter().map(|(_, f)| f.bytes()).sum::<usize>();
        self.lent -= removed.iter().filter(|(_, f)| f.via == Via::Lent).count();
        removed
    }

    pub(super) fn add_held(&mut self, held: AwaitedAnswer) {
        self.held_bytes += held.answer.message.len();
        self.held.insert(held.result.key(), held);
    }

    pub(super) fn remove_held(&mut self, key: u64) -> Option<AwaitedAnswer> {
        let held = self.held.remove(&key)?;
        self.held_bytes -= held.answer.message.len();
        Some(held)
    }

    /// Removes the held answers that `over` accepts.
    pub(super) fn remove_all_held(
        &mut self,
        over: impl Fn(&AwaitedAnswer) -> bool,
    ) -> Vec<AwaitedAnswer> {
        let removed = self.held.extract_if(|_, held| over(held));
        let removed: Vec<_> = removed.map(|(_, held)| held).collect();
        self.held_bytes -= removed
            .iter()
            .map(|held| held.answer.message.len())
            .sum::<usize>();
        removed
    }

    /// Time at which the first query in flight is given up.
    pub(super) fn flights_until(&self) -> Option<Instant> {
        self.flights.values().map(|flight| flight.deadline).min()
    }

    /// Time since which the oldest held answer waits.
    pub(super) fn held_since(&self) -> Option<Instant> {
        self.held.values().map(|held| held.answer.since).min()
    }

    /// Notes that the proxy did not read from the server for `pause`, and extends the server's time
    /// limit by it.
    pub(super) fn extend(&mut self, pause: Duration) {
        for flight in self.flights.values_mut() {
            flight.deadline += pause;
        }
    }
}
