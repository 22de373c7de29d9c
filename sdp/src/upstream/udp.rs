//! One worker's UDP sockets to servers, and the queries in flight on them.
//!
//! For each server and client identity there are a few connected sockets, each with a random source
//! port. Every batch of queries uses a random socket, and every query has a random id. A forger
//! must guess both (RFC 5452). Sockets are replaced after a while.
//!
//! More sockets are opened if more answers are expected than fit into the sockets' buffers, so that
//! a worker that gets no CPU time for a moment loses no answer.
//!
//! A query that must be sent from its client's own port uses the socket of its flow ([`flows`]).

use std::{
    collections::{HashMap, VecDeque},
    hash::BuildHasher,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use dns_wire::{HEADER_LEN, Header, answer};
use foldhash::quality::RandomState;
use limits::quota::{Holder, Quota};
use nix::sys::epoll::Epoll;
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::{
    arena::{Arena, Key},
    query::pending::{Joined, PendingQuery},
    socket,
    stats::{Counters, Fallback},
    transparent,
};

mod flows;
mod sockets;
#[cfg(test)]
mod tests;

use flows::Flows;
use sockets::{ServerKey, UpSocket};

/// Number of sockets per server and identity. Each batch uses a random one.
const SPREAD: usize = 4;
/// Time after which an idle socket is closed.
const MAX_IDLE: Duration = Duration::from_secs(30);
/// Maximum number of queries in flight per socket, so that ids stay hard to guess.
const MAX_WAITING: usize = 16_384;
/// Age up to which a query in flight can be joined by equal queries, which get its answer. An older
/// query may be lost, and equal queries must not be lost with it. So the next equal query is sent,
/// over another socket if this one is silent, and its answer is for all of them.
const JOIN: Duration = sockets::PATIENCE;
/// Maximum number of queries that wait for the answer to an equal query in flight.
const MAX_JOINED: usize = 64;

/// A query that waits for its server's answer.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) query: PendingQuery<Vec<u8>>,
    fingerprint: u64,
    socket: Key,
    id: u16,
    /// Whether the query's first attempt ended with an ICMP error.
    is_second: bool,
}

/// Where a query waits for its answer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Registration {
    /// The query must be sent.
    New(FlightRef),
    /// The query waits for the answer to an equal query in flight.
    Joined,
}

/// The flight of a query, and the socket that sends it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlightRef {
    pub(crate) socket: Key,
    pub(crate) flight: Key,
    /// Message id with which the query is sent.
    pub(crate) id: u16,
}

/// Why a query was not registered.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RegisterError {
    /// The endpoint has no share left, or the socket has too many queries.
    #[error("too many queries in flight")]
    Full,
    /// No socket to the server could be opened.
    #[error(transparent)]
    Socket(#[from] socket::SocketError),
}

/// Sockets and queries in flight of one worker.
pub(crate) struct UdpUpstream {
    sockets: Arena<UpSocket>,
    servers: HashMap<ServerKey, Vec<Option<Key>>, RandomState>,
    /// Sockets with the ports of clients.
    flows: Flows,
    /// Sockets that are soon to be replaced, each once.
    aging: Vec<Key>,
    /// Selects the socket of a server for the queries of this batch.
    spread: usize,
    flights: Arena<Flight>,
    /// The latest query of each fingerprint.
    latest: HashMap<u64, Key, RandomState>,
    hasher: RandomState,
    /// Queries in flight by endpoint.
    quota: Quota,
    deadlines: VecDeque<(Instant, Key)>,
    spare: Vec<Vec<u8>>,
    random: StdRng,
    marked: bool,
    timeout: Duration,
    fallbacks: Counters<Fallback>,
}

impl UdpUpstream {
    /// `marked`: whether packets carry the client's identity. `limit`: maximum number of queries in
    /// flight.
    pub(crate) fn new(
        marked: bool,
        limit: usize,
        timeout: Duration,
        fallbacks: Counters<Fallback>,
    ) -> Self {
        Self {
            sockets: Arena::default(),
            servers: HashMap::default(),
            flows: Flows::default(),
            aging: Vec::new(),
            spread: 0,
            flights: Arena::default(),
            latest: HashMap::default(),
            hasher: RandomState::default(),
            quota: Quota::new(limit),
            deadlines: VecDeque::new(),
            spare: Vec::new(),
            random: StdRng::from_os_rng(),
            marked,
            timeout,
            fallbacks,
        }
    }

    /// Whether `holder` may have one more query in flight.
    pub(crate) fn has_share(&self, holder: Holder) -> bool {
        self.quota.allows(holder, 1)
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.flights.len()
    }

    /// Selects another random socket for the following queries. Queries of one batch are sent with
    /// one system call. `limit`: maximum number of queries in flight from now on.
    pub(crate) fn next_batch(&mut self, limit: usize) {
        self.quota.set_limit(limit);
        self.spread = self.random.random_range(0..SPREAD);
    }

    /// Finds a socket and an id for a query, or an equal query in flight. Two equal queries in
    /// flight would double a forger's chance (RFC 5452, 5). New sockets are added to `epoll` under
    /// their key.
    pub(crate) fn register(
        &mut self,
        query: &mut PendingQuery<&[u8]>,
        message: &[u8],
        now: Instant,
        epoll: &Epoll,
    ) -> Result<Registration, RegisterError> {
        let fingerprint = self.fingerprint(query, message);
        if self.join(fingerprint, query, now) {
            return Ok(Registration::Joined);
        }
        self.begin(fingerprint, query, now, epoll)
            .map(Registration::New)
    }

    /// A hash of a query as its client sent it, without the id.
    fn fingerprint<Q>(&self, query: &PendingQuery<Q>, message: &[u8]) -> u64 {
        let (server, endpoint) = (query.from.server, query.endpoint);
        self.hasher.hash_one((message.get(2..), server, endpoint))
    }

    /// Finds a socket and an id for a query.
    fn begin(
        &mut self,
        fingerprint: u64,
        query: &mut PendingQuery<&[u8]>,
        now: Instant,
        epoll: &Epoll,
    ) -> Result<FlightRef, RegisterError> {
        let server = query.from.server;
        let holder = query.holder();
        if !self.quota.allows(holder, 1) {
            return Err(RegisterError::Full);
        }
        let identity = self.marked.then_some(query.identities.client);
        let of = |source| ServerKey {
            server,
            identity,
            source,
        };
        let key = self.socket_under(query.source, of, holder, now, epoll)?;
        let is_full = |socket: &UpSocket| socket.waiting.len() >= MAX_WAITING;
        if self.sockets.get(key).is_none_or(is_full) {
            return Err(RegisterError::Full);
        }
        let inherited = self.inherited(fingerprint, query, now);
        query.joined.extend(inherited);
        let Some(socket) = self.sockets.get_mut(key) else {
            return Err(RegisterError::Full);
        };
        let id = socket.free_id(&mut self.random);
        let mut question = self.spare.pop().unwrap_or_default();
        question.clear();
        question.extend_from_slice(query.question);
        let flight = self.flights.insert(Flight {
            query: query.sent(question, now),
            fingerprint,
            socket: key,
            id,
            is_second: false,
        });
        self.latest.insert(fingerprint, flight);
        self.flows.began(socket);
        socket.waiting.insert(id, flight);
        socket.queries += 1;
        socket.used = now;
        socket.silent_since.get_or_insert(now);
        if socket.begins_to_age(now) {
            self.aging.push(key);
        }
        self.deadlines.push_back((now + self.timeout, flight));
        self.quota.add(holder, 1);
        Ok(FlightRef {
            socket: key,
            flight,
            id,
        })
    }

    /// Registers a query once more, over another socket, after its first attempt ended with an ICMP
    /// error: behind the address of a Service, the new socket may lead to another pod. `message` is
    /// the query as quoted in the error. The query is sent again only if `message` is complete and
    /// unchanged. Returns the query if it cannot be sent again.
    pub(crate) fn again(
        &mut self,
        flight: Flight,
        message: &[u8],
        now: Instant,
        epoll: &Epoll,
    ) -> Result<FlightRef, Box<PendingQuery<Vec<u8>>>> {
        let (fingerprint, is_second) = (flight.fingerprint, flight.is_second);
        let is_whole = self.fingerprint(&flight.query, message) == fingerprint;
        let is_flow = flight.query.source.is_some_and(transparent::is_flow);
        if is_second || is_flow || !is_whole {
            return Err(Box::new(flight.query));
        }
        let mut question = Vec::new();
        let query = flight.query.map_question(|owned| question = owned);
        let mut query = query.map_question(|()| question.as_slice());
        self.spread_to_free(&query);
        match self.begin(fingerprint, &mut query, now, epoll) {
            Ok(registered) => {
                if let Some(flight) = self.flights.get_mut(registered.flight) {
                    flight.is_second = true;
                }
                self.recycle(question);
                Ok(registered)
            }
            Err(_) => {
                let query = query.map_question(|_| ());
                Err(Box::new(query.map_question(|()| question)))
            }
        }
    }

    /// Adds a query to an equal query in flight, if there is one.
    fn join(&mut self, fingerprint: u64, query: &mut PendingQuery<&[u8]>, now: Instant) -> bool {
        let latest = self.latest.get(&fingerprint).copied();
        let flight = latest.and_then(|latest| self.flights.get_mut(latest));
        let Some(Flight { query: first, .. }) = flight else {
            return false;
        };
        let (client, header) = (query.from.client, query.header);
        // A client repeats a query if the first one seems lost. The repetition must not wait for
        // the answer to the first one.
        let fits = first.equals(query)
            && first.waited(now) < JOIN
            && first.joined.len() < MAX_JOINED
            && first.recipients().all(|sent| sent != (client, header));
        if fits {
            first.joined.push(Joined {
                client,
                header,
                logged: query.logged.take(),
            });
        }
        fits
    }

    /// Queries that joined an equal query that may be lost. They also get the answer to `query`.
    fn inherited(
        &mut self,
        fingerprint: u64,
        query: &PendingQuery<&[u8]>,
        now: Instant,
    ) -> Vec<Joined> {
        let latest = self.latest.get(&fingerprint).copied();
        let flight = latest.and_then(|latest| self.flights.get_mut(latest));
        let Some(Flight { query: first, .. }) = flight else {
            return Vec::new();
        };
        if !first.equals(query) || first.waited(now) < JOIN {
            return Vec::new();
        }
        let repeated = (query.from.client, query.header);
        let joined = std::mem::take(&mut first.joined).into_iter();
        let (repeats, others) = joined.partition(|one| (one.client, one.header) == repeated);
        first.joined = repeats;
        others
    }

    /// The descriptor of a socket.
    pub(crate) fn fd(&self, socket: Key) -> Option<&OwnedFd> {
        self.sockets.get(socket).map(|s| &s.fd)
    }

    /// Removes and returns the query that `message`, received on `socket`, answers.
    pub(crate) fn answered(&mut self, socket: Key, message: &[u8], now: Instant) -> Option<Flight> {
        let id = Header::read(message)?.id;
        let from = self.sockets.get_mut(socket)?;
        let flight = *from.waiting.get(&id)?;
        if !answer::answers(message, &self.flights.get(flight)?.query.question) {
            return None;
        }
        from.answers(now);
        self.remove(flight)
    }

    /// Removes and returns the query that was returned as undelivered on `socket`. The network may
    /// have truncated it, but its id and question are present.
    pub(crate) fn undelivered(&mut self, socket: Key, query: &[u8]) -> Option<Flight> {
        let header = Header::read(query).filter(|h| !h.is_response())?;
        let flight = *self.sockets.get(socket)?.waiting.get(&header.id)?;
        let question = &self.flights.get(flight)?.query.question;
        query
            .get(HEADER_LEN..)?
            .starts_with(question)
            .then_some(())?;
        self.remove(flight)
    }

    /// Removes a query that could not be sent or took too long.
    pub(crate) fn remove(&mut self, key: Key) -> Option<Flight> {
        let flight = self.flights.remove(key)?;
        if self.latest.get(&flight.fingerprint) == Some(&key) {
            self.latest.remove(&flight.fingerprint);
        }
        if let Some(socket) = self.sockets.get_mut(flight.socket) {
            socket.waiting.remove(&flight.id);
            if socket.waiting.is_empty() {
                socket.silent_since = None;
            }
            self.flows.ended(flight.socket, socket);
            if socket.retired && socket.waiting.is_empty() {
                self.sockets.remove(flight.socket);
            }
        }
        self.quota.give_back(flight.query.holder(), 1);
        Some(flight)
    }

    /// Takes the question of a finished query back, to use its buffer again.
    pub(crate) fn recycle(&mut self, question: Vec<u8>) {
        if self.spare.len() < 1024 {
            self.spare.push(question);
        }
    }

    /// Time at which the next query times out.
    pub(crate) fn next_deadline(&mut self) -> Option<Instant> {
        // A query that is never answered must not keep the deadlines of all later queries in the
        // list.
        if self.deadlines.len() > 2 * self.flights.len() + 4096 {
            let flights = &self.flights;
            self.deadlines
                .retain(|(_, flight)| flights.get(*flight).is_some());
        }
        while let Some((deadline, flight)) = self.deadlines.front() {
            if self.flights.get(*flight).is_some() {
                return Some(*deadline);
            }
            self.deadlines.pop_front();
        }
        None
    }

    /// Removes any one query, if there is one.
    pub(crate) fn any(&mut self) -> Option<Flight> {
        self.next_deadline()?;
        let (_, flight) = self.deadlines.pop_front()?;
        self.remove(flight)
    }

    /// Removes a query whose time is over, if there is one.
    pub(crate) fn expired(&mut self, now: Instant) -> Option<Flight> {
        let is_over = self.next_deadline()? <= now;
        is_over.then(|| self.any()).flatten()
    }

    /// Closes sockets that have been idle for long.
    pub(crate) fn sweep(&mut self, now: Instant) {
        let idle: Vec<Key> = self
            .sockets
            .iter()
            .filter(|(_, s)| !s.server.is_flow() && s.waiting.is_empty())
            .filter(|(_, s)| now.duration_since(s.used) >= MAX_IDLE)
            .map(|(key, _)| key)
            .collect();
        for key in idle {
            self.close(key);
        }
    }
}
