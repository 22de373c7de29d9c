//! One client connection: queries in, answers out in whatever order they come.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use rand::Rng;
use tokio::{
    net::TcpStream,
    sync::mpsc::{Receiver, Sender, channel},
};

use super::{
    Shared,
    flight::{Flight, Held},
    frames::{FrameReader, FrameWriter, Read},
    upstream::{Behalf, Happened, TcpUpstream},
};
use crate::{
    listener::SocketOptions,
    mapping::{BootTime, Realised},
    notice::Failure,
    policy::rule::Transport,
    proxy::{
        Arrival, Asked, Fate, Outcome,
        stats::{AnswerResult, Label as _, Protocol, QueryResult, Stage},
    },
    query_log::{End, Entry},
    wire::{Header, Rcode, answer, reply, set_id, transfer::Transfer},
};

/// Queries of one connection that wait at once, for the server or the agent.
const MAX_WAITING: usize = 64;
/// Bytes of answers that may wait for the client before no more queries are read.
const MAX_OUT: usize = 256 * 1024;
/// While draining, a client that has just connected still gets to ask its first query.
const FIRST_QUERY: Duration = Duration::from_millis(500);
/// Reads that may bring nothing to answer before a drain takes leave of a client.
const LAST_LOOKS: usize = 16;
/// Messages after which others get their turn. The runtime counts reads, not
/// what is in them, and its timers stand still meanwhile.
const TURN: usize = 64;

/// One connection.
pub(super) struct Connection {
    shared: Arc<Shared>,
    stream: TcpStream,
    client: SocketAddr,
    server: SocketAddr,
    reader: FrameReader,
    out: FrameWriter,
    upstream: TcpUpstream,
    flights: HashMap<u16, Flight>,
    /// Answers that wait for the agent.
    held: HashMap<u64, Held>,
    next_held: u64,
    to_us: Sender<(u64, Realised)>,
    realised: Receiver<(u64, Realised)>,
    /// The client sends no more.
    ended: bool,
    /// Until when a first query is waited for; none once one has come.
    first_query: Option<Instant>,
    last_activity: Instant,
    now: Instant,
    /// Messages of this turn.
    taken: usize,
    message: Vec<u8>,
    own: Vec<u8>,
}

/// Why a connection is over.
enum Over {
    /// Nothing is left to do.
    Done,
    /// It broke, stalled or was stopped with something unanswered.
    Cut,
}

impl Connection {
    pub(super) fn new(
        stream: TcpStream,
        client: SocketAddr,
        server: SocketAddr,
        shared: Arc<Shared>,
    ) -> Self {
        let now = Instant::now();
        // Room for every held answer: the callback never finds it full.
        let (to_us, realised) = channel(MAX_WAITING);
        // Only delays are lost if the kernel refuses.
        let _ = stream.set_nodelay(true);
        let upstream = TcpUpstream::new(server, shared.proxy.stats().fallbacks.clone());
        Self {
            shared,
            stream,
            client,
            server,
            reader: FrameReader::default(),
            out: FrameWriter::default(),
            upstream,
            flights: HashMap::new(),
            held: HashMap::new(),
            next_held: 0,
            to_us,
            realised,
            ended: false,
            first_query: Some(now + FIRST_QUERY),
            last_activity: now,
            now,
            taken: 0,
            message: Vec::new(),
            own: Vec::new(),
        }
    }

    /// Serves until the client, the idle limit, a drain or a stop ends it.
    pub(super) async fn run(mut self, now: Instant) {
        self.now = now;
        let over = loop {
            if let Some(over) = self.over() {
                break over;
            }
            if self.taken >= TURN {
                self.taken = 0;
                tokio::task::yield_now().await;
            }
            let may_read = !self.ended && self.may_read();
            let deadline = tokio::time::Instant::from_std(self.deadline());
            let draining = self.shared.draining.is_cancelled();
            let step = tokio::select! {
                biased;
                () = self.shared.stop.cancelled() => Err(Over::Cut),
                Some((key, realised)) = self.realised.recv() => {
                    self.now = Instant::now();
                    self.release(key, realised);
                    Ok(())
                }
                // Before the peers: one that never pauses must not stop the clock.
                () = tokio::time::sleep_until(deadline) => {
                    self.now = Instant::now();
                    self.on_time()
                }
                happened = self.upstream.happen() => {
                    self.now = Instant::now();
                    self.on_upstream(&happened);
                    Ok(())
                }
                ready = self.stream.writable(), if self.out.len() > 0 => {
                    self.now = Instant::now();
                    ready.map_err(|_| Over::Cut).and_then(|()| self.flush())
                }
                ready = self.stream.readable(), if may_read => {
                    self.now = Instant::now();
                    ready.map_err(|_| Over::Cut).and_then(|()| self.read())
                }
                () = self.shared.draining.cancelled(), if !draining => Ok(()),
            };
            if let Err(over) = step {
                break over;
            }
        };
        self.close(&over);
    }

    /// Whether everything is done that will be.
    fn over(&mut self) -> Option<Over> {
        if self.has_work() {
            return None;
        }
        if self.ended {
            return Some(Over::Done);
        }
        if !self.shared.draining.is_cancelled() || self.reader.is_partial() {
            return None;
        }
        // Between two queries: look once more, so that none is cut off.
        for _ in 0..LAST_LOOKS {
            match self.reader.fill(&self.stream) {
                Ok(Read::Some) => self.take_queries(),
                Ok(Read::Nothing) if self.first_query.is_some_and(|until| self.now < until) => {
                    return None;
                }
                Ok(Read::Nothing | Read::End) | Err(_) => break,
            }
            if self.has_work() || self.reader.is_partial() {
                return None;
            }
        }
        Some(Over::Done)
    }

    fn has_work(&self) -> bool {
        !self.flights.is_empty() || !self.held.is_empty() || self.out.len() > 0
    }

    fn may_read(&self) -> bool {
        self.flights.len() + self.held.len() < MAX_WAITING && self.out.len() < MAX_OUT
    }

    fn read(&mut self) -> Result<(), Over> {
        match self.reader.fill(&self.stream) {
            Ok(Read::Some) => self.take_queries(),
            Ok(Read::Nothing) => {}
            Ok(Read::End) => self.ended = true,
            Err(_) => return Err(Over::Cut),
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Over> {
        if self.out.flush(&self.stream).map_err(|_| Over::Cut)? {
            self.last_activity = self.now;
        }
        self.take_queries();
        Ok(())
    }

    /// Judges the queries that have come whole.
    fn take_queries(&mut self) {
        let mut message = std::mem::take(&mut self.message);
        while self.may_read() && self.reader.take(&mut message) {
            self.last_activity = self.now;
            self.first_query = None;
            self.taken += 1;
            self.query(&message);
        }
        self.message = message;
    }

    fn query(&mut self, message: &[u8]) {
        let proxy = Arc::clone(&self.shared.proxy);
        let stats = proxy.stats();
        stats.transports.inc(Protocol::Tcp);
        let (client, server) = (self.client, self.server);
        let arrival = Arrival {
            client,
            server,
            transport: Transport::Tcp,
        };
        let mut query = match proxy.query(message, &arrival, &mut self.own) {
            Outcome::Ignore => return,
            Outcome::Reply => return self.out.push(&self.own),
            Outcome::Forward(query) => query,
        };
        let full =
            stats.in_flight.get() >= u64::try_from(proxy.config().in_flight).unwrap_or(u64::MAX);
        if full {
            stats.queries.inc(QueryResult::Shed);
            let asked = Asked {
                question: query.question,
                endpoint: query.endpoint,
                client,
                server,
                transport: Transport::Tcp,
                identities: query.identities,
                policy_check: query.policy_check,
                waited: Duration::ZERO,
            };
            proxy.notice_failure(&asked, Failure::Overload);
            let code = Rcode::ServFail;
            if let Some(entry) = query.logged.take() {
                proxy.log(entry, End::own(QueryResult::Shed.text(), code), self.now);
            }
            reply::to_kept(query.kept, query.question, code, &mut self.own);
            return self.out.push(&self.own);
        }
        let mut id = rand::rng().random();
        while self.flights.contains_key(&id) {
            id = rand::rng().random();
        }
        let mut message = message.to_vec();
        if let Some(edns) = &query.hop_by_hop {
            edns.strip_keepalive(&mut message);
        }
        set_id(&mut message, id);
        let marked = self.shared.options == SocketOptions::Transparent;
        let flight = Flight {
            kept: query.kept,
            message,
            question: query.question.to_vec(),
            endpoint: query.endpoint,
            behalf: Behalf {
                identity: marked.then_some(query.identities.client),
                source: query.source,
            },
            sent_at: self.now,
            identities: query.identities,
            policy_check: query.policy_check,
            resent: false,
            logged: query.logged.take(),
            transfer: Transfer::of(query.question),
        };
        stats.in_flight.up();
        self.send(id, flight);
    }

    fn send(&mut self, id: u16, flight: Flight) {
        match self.upstream.send(&flight.message, flight.behalf) {
            Ok(()) => {
                self.flights.insert(id, flight);
            }
            Err(error) => {
                tracing::debug!(%error, "no upstream connection");
                self.fail(flight);
            }
        }
    }

    /// Ends the query log's entry of a query, if it has one.
    fn log(&self, entry: &mut Option<Box<Entry>>, end: End) {
        if let Some(entry) = entry.take() {
            self.shared.proxy.log(entry, end, self.now);
        }
    }

    fn fail(&mut self, mut flight: Flight) {
        let asked = flight.asked((self.client, self.server), self.now);
        self.shared
            .proxy
            .notice_failure(&asked, Failure::Unreachable);
        let result = QueryResult::UpstreamError.text();
        self.log(&mut flight.logged, End::own(result, Rcode::ServFail));
        let stats = self.shared.proxy.stats();
        stats.in_flight.down();
        stats.queries.inc(QueryResult::UpstreamError);
        reply::unreachable(flight.kept, &flight.question, &mut self.own);
        self.out.push(&self.own);
    }

    fn servfail(&mut self, flight: &Flight) {
        let code = Rcode::ServFail;
        reply::to_kept(flight.kept, &flight.question, code, &mut self.own);
        self.out.push(&self.own);
    }

    fn on_upstream(&mut self, happened: &Happened) {
        match happened {
            Happened::Progress => {}
            Happened::Read => {
                let mut message = std::mem::take(&mut self.message);
                while self.upstream.reader.take(&mut message) {
                    self.taken += 1;
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
        for (id, mut flight) in std::mem::take(&mut self.flights) {
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
            self.flights
                .get(id)
                .is_some_and(|f| f.is_answered_by(message))
        });
        if let Some(id) = asked
            && self.transfer(id, message)
        {
            return;
        }
        let Some(mut flight) = asked.and_then(|id| self.flights.remove(&id)) else {
            stats.answers.inc(AnswerResult::Unexpected);
            return;
        };
        self.last_activity = self.now;
        stats.in_flight.down();
        let took = self.now.duration_since(flight.sent_at);
        stats.stages.observe(Stage::Upstream, took);
        set_id(message, flight.kept.id);
        let asked = flight.asked((self.client, self.server), self.now);
        let key = self.next_held;
        self.next_held += 1;
        let to_us = self.to_us.clone();
        let answered = proxy.answer(&asked, message, BootTime::now(), || {
            Box::new(move |realised| {
                // Fails only if the connection is gone.
                let _ = to_us.try_send((key, realised));
            })
        });
        if let Some(edns) = &answered.hop_by_hop {
            edns.strip_keepalive(message);
        }
        match answered.fate {
            Fate::Hold => {
                let held = Held {
                    message: message.clone(),
                    logged: flight.logged.take(),
                    asked: flight.sent_at,
                    since: self.now,
                };
                self.held.insert(key, held);
                stats.held.up();
            }
            Fate::Release(result) => {
                stats.answers.inc(result);
                stats.stages.observe(Stage::Total, took);
                self.log(&mut flight.logged, End::sent(result.text(), message));
                self.out.push(message);
            }
            Fate::Malformed => {
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
        let Some(flight) = self.flights.get_mut(&id) else {
            return false;
        };
        let Some(transfer) = &mut flight.transfer else {
            return false;
        };
        let is_over = transfer.take(message);
        flight.sent_at = self.now;
        self.last_activity = self.now;
        set_id(message, flight.kept.id);
        let stats = self.shared.proxy.stats();
        if is_over {
            if let Some(mut flight) = self.flights.remove(&id) {
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

    fn release(&mut self, key: u64, realised: Realised) {
        if let Some(mut held) = self.held.remove(&key) {
            let result = AnswerResult::of(realised);
            if result == AnswerResult::Rejected {
                reply::to_unfit(&held.message, Rcode::ServFail, &mut self.own);
                held.message.clone_from(&self.own);
            }
            self.send_held(held, result);
        }
        self.take_queries();
    }

    fn send_held(&mut self, mut held: Held, result: AnswerResult) {
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

    fn deadline(&self) -> Instant {
        let config = self.shared.proxy.config();
        let flights = self.flights.values().map(|f| f.sent_at + config.timeout);
        let held = self.held.values().map(|held| held.since + config.max_delay);
        let draining = self.shared.draining.is_cancelled();
        let partial = self.reader.is_partial();
        let idle = self.last_activity + config.tcp_idle;
        let idle = idle_until(self.first_query, draining, partial, idle);
        flights.chain(held).min().unwrap_or(idle)
    }

    fn on_time(&mut self) -> Result<(), Over> {
        let now = self.now;
        let (timeout, max_delay, idle) = {
            let config = self.shared.proxy.config();
            (config.timeout, config.max_delay, config.tcp_idle)
        };
        let late = self
            .held
            .extract_if(|_, held| now.duration_since(held.since) >= max_delay);
        for (_, held) in late.collect::<Vec<_>>() {
            self.send_held(held, AnswerResult::Late);
        }
        let proxy = &self.shared.proxy;
        let stats = proxy.stats();
        let ends = (self.client, self.server);
        self.flights.retain(|_, flight| {
            let waits = now.duration_since(flight.sent_at) < timeout;
            if !waits {
                proxy.notice_failure(&flight.asked(ends, now), Failure::Timeout);
                stats.in_flight.down();
                if !flight.has_begun() {
                    stats.upstream_timeouts.add(1);
                    let took = now.duration_since(flight.sent_at);
                    stats.stages.observe(Stage::TotalTimeout, took);
                }
                if let Some(entry) = flight.logged.take() {
                    proxy.log(entry, End::unanswered("timeout"), now);
                }
            }
            waits
        });
        let waiting = !self.flights.is_empty() || !self.held.is_empty();
        if !waiting && now.duration_since(self.last_activity) >= idle {
            let unsent = self.out.len() > 0;
            return Err(if unsent { Over::Cut } else { Over::Done });
        }
        self.take_queries();
        Ok(())
    }

    fn close(&mut self, over: &Over) {
        if matches!(over, Over::Done) && !self.ended {
            // A query that comes between the last look and the closing is answered with a
            // reset. The end goes before it: so the client sees that nobody read that query.
            let _ = socket2::SockRef::from(&self.stream).shutdown(std::net::Shutdown::Write);
        }
        let stats = self.shared.proxy.stats();
        let unanswered = self.has_work();
        let flights = self.flights.values_mut().map(|flight| {
            stats.in_flight.down();
            &mut flight.logged
        });
        let held = self.held.values_mut().map(|held| {
            stats.held.down();
            &mut held.logged
        });
        for entry in flights.chain(held).filter_map(Option::take) {
            let end = End::unanswered("cut");
            self.shared.proxy.log(entry, end, self.now);
        }
        if matches!(over, Over::Cut) && unanswered && self.shared.stop.is_cancelled() {
            self.shared.cut.fetch_add(1, Ordering::AcqRel);
        }
    }
}

/// When a connection with nothing in flight is looked at again. One whose query
/// came in part is not between queries: the rest is waited for, draining or not.
fn idle_until(
    first_query: Option<Instant>,
    draining: bool,
    partial: bool,
    idle: Instant,
) -> Instant {
    first_query.filter(|_| draining && !partial).unwrap_or(idle)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_of_a_first_query_is_not_looked_at_again_before_the_idle_limit() {
        let opened = Instant::now();
        let first_query = Some(opened + FIRST_QUERY);
        let idle = opened + 20 * FIRST_QUERY;
        let until = |draining, partial| idle_until(first_query, draining, partial, idle);
        assert_eq!(until(true, false), opened + FIRST_QUERY);
        assert_eq!(until(true, true), idle);
        assert_eq!(until(false, false), idle);
        assert_eq!(idle_until(None, true, false, idle), idle);
    }
}
