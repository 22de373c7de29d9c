//! One client connection: queries in, answers out in any order.

mod answers;
mod client;
mod memory;
mod queries;

use std::{
    io::ErrorKind,
    net::SocketAddr,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use dns_policy::mapping::Realised;
use limits::quota::Holder;
use tokio::{net::TcpStream, sync::Semaphore};

use self::{client::Client, memory::Memory, queries::Unsent};
use super::{
    Shared,
    flight::Waiting,
    frames::Read,
    links::{Links, Via},
    results::Results,
    upstream::UpstreamEvent,
};
use crate::{
    listener::delayed::{self, Postponed},
    resolve::LookupCache,
    stats::AnswerResult,
};

/// Maximum number of queries of one connection that wait at once for the server or the agent.
const MAX_WAITING: usize = 64;
/// Bytes of queries in flight at which reading stops.
const MAX_ASKED: usize = 64 * 1024;
/// Bytes of answers waiting for the client or the agent at which the proxy stops reading queries
/// and answers.
const MAX_OUT: usize = 128 * 1024;
/// Bytes of memory for messages that each connection may use. Further memory counts in the
/// endpoint's share.
pub(crate) const ALLOWANCE: usize = 16 * 1024;
/// Largest buffer in bytes that is kept while no message waits.
const KEPT: usize = 2 * 1024;
/// Maximum number of reads without a query during a drain before the connection ends.
const MAX_LAST_READS: usize = 16;
/// Time within which a client that continues to send can see that the connection has ended.
const LAST_READS: Duration = Duration::from_secs(1);
/// How often a query that waits for a connection to the server tries again.
const UNSENT_RETRY: Duration = Duration::from_millis(100);
/// Units of work after which other connections run. A message counts as one unit, and so does each
/// [`MESSAGE`] bytes of it. The runtime counts reads only, and its timers do not run during the
/// work.
const TURN: usize = 64;
/// Bytes of a message that cost as much as the message itself.
const MESSAGE: usize = 512;

/// A client's connection, served by one task.
pub(super) struct Connection {
    shared: Arc<Shared>,
    client: Client,
    server: SocketAddr,
    links: Links,
    waiting: Waiting,
    /// A query that waits for a place in flight or for rules. No more queries are read while it
    /// waits.
    delayed: Option<Postponed>,
    /// A query that waits for a connection to the server. No more queries are read while it waits.
    unsent: Option<Unsent>,
    /// Memory that counts in the endpoint's share.
    memory: Memory,
    results: Results,
    /// Deadline for one more query during a drain.
    last_query: Option<Instant>,
    /// Whether no more queries are read. The connection ends when its queries in flight are
    /// answered.
    closing: bool,
    /// Time since which the server is not read, because answers wait for the client.
    paused: Option<Instant>,
    now: Instant,
    turn: Turn,
    scratch: Scratch,
}

/// The work of a connection until other connections run.
struct Turn {
    /// Work done in this turn, in the units of [`TURN`].
    taken: usize,
    /// Permits for work, which all connections of the endpoint share.
    permits: Arc<Semaphore>,
}

impl Turn {
    /// Counts the work for a message.
    fn count(&mut self, message: &[u8]) {
        self.taken += 1 + message.len() / MESSAGE;
    }

    /// Whether other connections must run. The next turn then begins.
    fn is_over(&mut self) -> bool {
        let is_over = self.taken >= TURN;
        if is_over {
            self.taken = 0;
        }
        is_over
    }
}

/// Memory that is used again for each message.
#[derive(Default)]
struct Scratch {
    message: Vec<u8>,
    own: Vec<u8>,
    lookups: LookupCache,
}

impl Scratch {
    /// Frees buffers that large messages have left behind.
    fn shrink(&mut self) {
        for buffer in [&mut self.message, &mut self.own] {
            if buffer.capacity() > KEPT {
                *buffer = Vec::new();
            }
        }
    }
}

/// The result of the last reads before a connection ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LastRead {
    /// No more bytes had arrived, or the client does not send any more.
    Nothing,
    /// Bytes were still arriving after [`MAX_LAST_READS`] reads.
    Endless,
    /// The connection may not read more at the moment.
    Full,
}

/// An event that a connection waits for.
enum Event {
    /// The agent's result for a held answer.
    Realised(u64, Realised),
    /// A deadline may have passed.
    Alarm,
    /// An event of the connection to the server.
    Upstream(Via, UpstreamEvent),
    /// The client's socket can be written.
    Writable,
    /// The client has sent something.
    Readable,
    /// The process has begun to drain.
    Draining,
    /// The process reads no more queries.
    Closing,
}

/// The reason why a connection ends.
enum EndReason {
    /// Nothing is left to do.
    Done,
    /// The connection broke, stalled or was stopped with unanswered queries.
    Cut,
}

impl Connection {
    pub(super) fn new(
        stream: TcpStream,
        (client, server): (SocketAddr, SocketAddr),
        holder: Holder,
        shared: Arc<Shared>,
    ) -> Self {
        let now = Instant::now();
        let links = Links::new(server, Arc::clone(&shared.servers));
        Self {
            memory: Memory::new(
                shared.memory.empty(holder),
                shared.proxy.stats().tcp_bytes.clone(),
            ),
            turn: Turn {
                taken: 0,
                permits: shared.turns.of(holder),
            },
            shared,
            client: Client::new(stream, client, now),
            server,
            links,
            waiting: Waiting::default(),
            delayed: None,
            unsent: None,
            results: Results::default(),
            last_query: None,
            closing: false,
            paused: None,
            now,
            scratch: Scratch::default(),
        }
    }

    /// Serves the client until the connection ends: by the client, the idle limit, a drain or a
    /// stop.
    pub(super) async fn run(mut self, now: Instant) {
        self.now = now;
        let alarm = tokio::time::sleep_until(self.deadline().into());
        tokio::pin!(alarm);
        let over = loop {
            if let Some(over) = self.over() {
                break over;
            }
            if self.links.is_lent() && !self.waiting.uses_lent() {
                self.links.give_back(std::iter::empty(), self.now);
            }
            if !self.account() {
                self.shared.proxy.stats().tcp_overdrawn.add(1);
                break EndReason::Cut;
            }
            if self.turn.is_over() {
                tokio::task::yield_now().await;
            }
            let may_read = !self.client.ended && self.may_read();
            let has_room = self.has_room();
            self.pause(!has_room);
            // Most deadlines only move to later times. The alarm is therefore set again only when
            // it fires.
            let deadline = self.deadline().into();
            if deadline < alarm.deadline() || alarm.is_elapsed() {
                alarm.as_mut().reset(deadline);
            }
            let draining = self.last_query.is_some();
            let event = tokio::select! {
                biased;
                () = self.shared.stop.cancelled() => break EndReason::Cut,
                (key, realised) = self.results.next() => Event::Realised(key, realised),
                // Polled before the client and the server, so that a peer that never pauses does
                // not stop the timers.
                () = &mut alarm => Event::Alarm,
                (via, happened) = self.links.happen(), if has_room => Event::Upstream(via, happened),
                ready = self.client.stream.writable(), if self.client.out.len() > 0 => match ready {
                    Ok(()) => Event::Writable,
                    Err(_) => break EndReason::Cut,
                },
                ready = self.client.stream.readable(), if may_read => match ready {
                    Ok(()) => Event::Readable,
                    Err(_) => break EndReason::Cut,
                },
                () = self.shared.draining.cancelled(), if !draining => Event::Draining,
                () = self.shared.closing.cancelled(), if !self.closing => Event::Closing,
            };
            let turn = Arc::clone(&self.turn.permits);
            // Nothing closes the permits.
            let _turn = turn.acquire().await;
            self.now = Instant::now();
            if let Err(over) = self.on_event(&event) {
                break over;
            }
        };
        self.close(&over);
        if self.closing && matches!(over, EndReason::Done) {
            self.discard().await;
        }
    }

    fn on_event(&mut self, event: &Event) -> Result<(), EndReason> {
        match event {
            Event::Realised(key, realised) => self.release(*key, *realised),
            Event::Alarm => {
                // The deadline of a delayed query is always in the future, so each alarm is a
                // retry.
                let early = !self.is_delayed() && self.now < self.deadline();
                if !early {
                    self.on_time()?;
                }
            }
            Event::Upstream(via, happened) => self.on_upstream(*via, happened),
            Event::Writable => self.flush()?,
            Event::Readable => self.read()?,
            Event::Draining => {
                self.last_query = Some(self.now + self.shared.proxy.config().tcp_last_query);
            }
            // Without queries in flight the end is sent at once, otherwise with the last answer.
            Event::Closing => self.closing = true,
        }
        Ok(())
    }

    /// Reads and drops the client's messages until the client has seen the end. Closing a
    /// connection with unread data resets it, and a reset destroys answers that are still on their
    /// way.
    async fn discard(&mut self) {
        let read = async {
            let mut scratch = [0; KEPT];
            while self.client.stream.readable().await.is_ok() {
                match self.client.stream.try_read(&mut scratch) {
                    Ok(0) => break,
                    Err(error) if error.kind() != ErrorKind::WouldBlock => break,
                    Ok(_) | Err(_) => tokio::task::yield_now().await,
                }
            }
        };
        tokio::select! {
            biased;
            () = self.shared.stop.cancelled() => {}
            () = tokio::time::sleep(LAST_READS) => {}
            () = read => {}
        }
    }

    /// How the connection ends; `None` if there is still something to do.
    fn over(&mut self) -> Option<EndReason> {
        if self.client.finished {
            return Some(EndReason::Done);
        }
        if self.has_work() {
            return None;
        }
        if self.client.ended || self.closing {
            return Some(EndReason::Done);
        }
        let until = self.last_query?;
        let last = self.read_last();
        if self.has_work() || self.client.reader.is_partial() {
            return None;
        }
        match last {
            LastRead::Nothing if self.now < until && !self.client.ended => None,
            LastRead::Nothing | LastRead::Endless => Some(EndReason::Done),
            LastRead::Full => None,
        }
    }

    /// Reads once more before the end, so that no query is lost.
    fn read_last(&mut self) -> LastRead {
        for _ in 0..MAX_LAST_READS {
            if !self.may_read() {
                return LastRead::Full;
            }
            match self.client.read_now() {
                Ok(Read::Some) => self.take_queries(),
                Ok(Read::Nothing | Read::End) | Err(_) => return LastRead::Nothing,
            }
        }
        LastRead::Endless
    }

    /// Whether the waiting bytes are the last ones: no more queries are read, and every query is
    /// answered.
    fn is_last(&mut self) -> bool {
        let is_answered = self.waiting.is_empty() && !self.is_delayed();
        if self.closing {
            return is_answered && !self.client.ended;
        }
        self.last_query.is_some()
            && is_answered
            && !self.client.ended
            && self.read_last() != LastRead::Full
            && self.waiting.is_empty()
            && !self.is_delayed()
            && !self.client.reader.is_partial()
    }

    fn has_work(&self) -> bool {
        !self.waiting.is_empty() || self.is_delayed() || self.client.out.len() > 0
    }

    fn is_delayed(&self) -> bool {
        self.delayed.is_some() || self.unsent.is_some()
    }

    fn may_read(&self) -> bool {
        !self.closing
            && !self.is_delayed()
            && self.waiting.len() < MAX_WAITING
            && self.waiting.asked_bytes() < MAX_ASKED
            && self.has_room()
    }

    /// Whether more answers may be read. The server of a client that does not read its answers is
    /// not read either, so that the memory of this process does not fill.
    fn has_room(&self) -> bool {
        self.client.out.len() + self.waiting.held_bytes() < MAX_OUT
    }

    /// Pauses the time limit of the server while the server is not read.
    fn pause(&mut self, pause: bool) {
        if pause {
            self.paused.get_or_insert(self.now);
        } else if let Some(since) = self.paused.take() {
            self.waiting.extend(self.now.duration_since(since));
        }
    }

    /// Counts the memory in use in the endpoint's share. Returns whether the share allows that
    /// much.
    fn account(&mut self) -> bool {
        if !self.has_work() {
            self.shrink();
        }
        let scratch = self.scratch.message.capacity() + self.scratch.own.capacity();
        let buffers = self.client.reader.memory() + self.client.out.memory() + self.links.memory();
        let delayed = self.delayed.as_ref().map_or(0, Postponed::units)
            + self.unsent.as_ref().map_or(0, Unsent::units);
        let waiting = self.waiting.asked_bytes() + self.waiting.held_bytes() + delayed;
        let used = scratch + buffers + waiting;
        self.memory.charge(used.saturating_sub(ALLOWANCE))
    }

    /// Frees buffers that large messages have left behind.
    fn shrink(&mut self) {
        self.client.reader.shrink();
        self.client.out.shrink();
        self.links.shrink();
        self.scratch.shrink();
    }

    fn read(&mut self) -> Result<(), EndReason> {
        match self.client.reader.fill(&self.client.stream) {
            Ok(Read::Some) => self.take_queries(),
            Ok(Read::Nothing) => {}
            Ok(Read::End) => self.client.ended = true,
            Err(_) => return Err(EndReason::Cut),
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), EndReason> {
        if self.is_last() {
            let flushed = self.client.flush_last(self.now);
            return flushed.map_err(|_| EndReason::Cut);
        }
        self.client.flush(self.now).map_err(|_| EndReason::Cut)?;
        self.take_queries();
        Ok(())
    }

    fn deadline(&self) -> Instant {
        let config = self.shared.proxy.config();
        let flights = self.waiting.flights_until();
        let flights = flights.filter(|_| self.paused.is_none());
        let held = self.waiting.held_since();
        let held = held.map(|since| since + config.max_delay);
        let idle = self.client.last_activity + config.tcp_idle;
        if self.is_stalled() {
            return held.unwrap_or(idle).min(idle);
        }
        let retry = self.delayed.is_some().then(|| self.now + delayed::RETRY);
        let unsent = self.unsent.is_some().then(|| self.now + UNSENT_RETRY);
        let partial = self.client.reader.is_partial();
        let last_query = self.last_query.filter(|_| self.client.out.len() == 0);
        let idle = idle_until(last_query, partial, idle);
        let all = flights.into_iter().chain(held).chain(retry).chain(unsent);
        all.min().unwrap_or(idle)
    }

    /// Whether the connection must wait until the client has read some of its answers.
    fn is_stalled(&self) -> bool {
        self.client.out.len() >= MAX_OUT
    }

    fn on_time(&mut self) -> Result<(), EndReason> {
        let now = self.now;
        let (max_delay, idle) = {
            let config = self.shared.proxy.config();
            (config.max_delay, config.tcp_idle)
        };
        let is_late = |since| now.duration_since(since) >= max_delay;
        for held in self
            .waiting
            .remove_all_held(|held| is_late(held.answer.since))
        {
            self.send_held(held.answer, AnswerResult::Late);
        }
        if self.paused.is_none() {
            self.give_up();
        }
        let waits = !self.waiting.is_empty() || self.is_delayed();
        let waits = waits && !self.is_stalled();
        if !waits && now.duration_since(self.client.last_activity) >= idle {
            let unsent = self.client.out.len() > 0;
            return Err(if unsent {
                EndReason::Cut
            } else {
                EndReason::Done
            });
        }
        self.take_queries();
        Ok(())
    }

    /// Gives up queries that their server did not answer in time.
    fn give_up(&mut self) {
        let now = self.now;
        let observer = self.shared.proxy.observer();
        for (_, mut flight) in self.waiting.remove_flights(|flight| now >= flight.deadline) {
            self.links.unserved(flight.via);
            if flight.has_begun() {
                observer.stalled(&mut flight.query, now);
            } else {
                observer.timed_out(&mut flight.query, now);
            }
        }
    }

    fn close(&mut self, over: &EndReason) {
        if matches!(over, EndReason::Done) && !self.client.ended && !self.client.finished {
            // The kernel answers a query that arrives between the last read and the close with a
            // reset. The end is sent before it, so the client can see that the query was not read.
            let _ = self.client.end();
        }
        let unanswered = self.has_work();
        let (proxy, now) = (&self.shared.proxy, self.now);
        let observer = proxy.observer();
        if let Some(Postponed::ForShare(query)) = self.delayed.take() {
            query.act(|mut query, _| observer.cut(&mut query, now));
        }
        if let Some(unsent) = self.unsent.take() {
            unsent.act(|mut query, _, _| observer.cut(&mut query, now));
        }
        self.links.give_back(self.waiting.lent_ids(), now);
        for (_, mut flight) in self.waiting.remove_flights(|_| true) {
            observer.cut(&mut flight.query, now);
        }
        for mut held in self.waiting.remove_all_held(|_| true) {
            observer.cut_held(&mut held.answer, now);
        }
        if matches!(over, EndReason::Cut) && unanswered && self.shared.stop.is_cancelled() {
            self.shared.cut.fetch_add(1, Ordering::AcqRel);
        }
    }
}

/// Time at which a connection without queries in flight is checked again. A connection with a part
/// of a query waits for the rest, even during a drain.
fn idle_until(last_query: Option<Instant>, partial: bool, idle: Instant) -> Instant {
    let last_query = last_query.filter(|_| !partial);
    last_query.map_or(idle, |last_query| last_query.min(idle))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn part_of_a_query_is_not_looked_at_again_before_the_idle_limit() {
        let idle = Instant::now() + Duration::from_secs(10);
        let last_query = Some(idle - Duration::from_secs(9));
        assert_eq!(
            idle_until(last_query, false, idle),
            idle - Duration::from_secs(9)
        );
        assert_eq!(idle_until(last_query, true, idle), idle);
        assert_eq!(idle_until(None, false, idle), idle);
    }
}
