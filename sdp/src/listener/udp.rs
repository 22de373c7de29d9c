//! One UDP worker: a thread with its own sockets, its own queries in flight and no lock on the way.
//!
//! Everything happens in [`Worker::run`]: wait, receive a batch of queries or
//! answers, judge each, send what results in batches.

use std::{
    io,
    net::SocketAddr,
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::{
    SocketOptions,
    control::{Control, Leaving},
    held::{Held, HeldAnswer},
    replies::{Replies, send_all},
};
use crate::{
    arena::Key,
    mapping::{BootTime, Realised},
    policy::rule::Transport,
    proxy::{
        Arrival, Asked, Fate, Outcome, Proxy,
        stats::{AnswerResult, Protocol, QueryResult},
    },
    socket::{
        self,
        sys::{BATCH, Datagram, RecvBatch},
    },
    steering::Member,
    upstream::udp::{Flight, PlaceError, Placed, UdpUpstream},
    wire::{Rcode, reply, set_id},
};

/// Batches taken from one socket before the others get their turn.
const ROUNDS: usize = 4;
/// Events taken from the kernel at once.
const EVENTS: usize = 64;
/// How often idle sockets are looked for.
const SWEEP: Duration = Duration::from_secs(5);
/// Epoll tokens above those of upstream sockets, whose generations stay far below.
const TOKEN_WAKE: u64 = u64::MAX;
/// Token of the first listener; the second is one less.
const TOKEN_LISTENER: u64 = u64::MAX - 1;

/// A socket that queries come to.
struct Listener {
    fd: OwnedFd,
    ipv6: bool,
    overflow: u32,
}

/// One worker.
pub(super) struct Worker {
    proxy: Arc<Proxy>,
    control: Arc<Control>,
    options: SocketOptions,
    epoll: Epoll,
    listeners: Vec<Listener>,
    recv: RecvBatch,
    upstream: UdpUpstream,
    replies: Replies,
    held: Held,
    realised: Vec<(Key, Realised)>,
    /// Answers of our own and changed copies.
    own: Vec<u8>,
    member: Option<Member>,
    leaving: Option<Leaving>,
    next_sweep: Instant,
    now: Instant,
}

impl Worker {
    /// `limit`: queries in flight at most.
    pub(super) fn new(
        proxy: Arc<Proxy>,
        control: Arc<Control>,
        options: SocketOptions,
        sockets: Vec<(OwnedFd, bool)>,
        limit: usize,
        member: Option<Member>,
    ) -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let readable = |token| EpollEvent::new(EpollFlags::EPOLLIN, token);
        epoll.add(control.descriptor(), readable(TOKEN_WAKE))?;
        let mut listeners = Vec::new();
        for ((fd, ipv6), below) in sockets.into_iter().zip(0..) {
            epoll.add(&fd, readable(TOKEN_LISTENER - below))?;
            listeners.push(Listener {
                fd,
                ipv6,
                overflow: 0,
            });
        }
        let marked = options == SocketOptions::Transparent;
        let now = Instant::now();
        Ok(Self {
            upstream: UdpUpstream::new(marked, limit, proxy.config().timeout),
            replies: Replies::new(options),
            held: Held::new(proxy.config().max_delay),
            proxy,
            control,
            options,
            epoll,
            listeners,
            recv: RecvBatch::new(),
            realised: Vec::new(),
            own: Vec::new(),
            member,
            leaving: None,
            next_sweep: now + SWEEP,
            now,
        })
    }

    /// Works until stopped or drained.
    pub(super) fn run(mut self) {
        let mut events = [EpollEvent::empty(); EVENTS];
        loop {
            let timeout = self.timeout();
            let count = match self.epoll.wait(&mut events, timeout) {
                Ok(count) => count,
                Err(nix::errno::Errno::EINTR) => 0,
                Err(e) => {
                    tracing::error!(error = %e, "a DNS worker cannot wait for events and stops");
                    break;
                }
            };
            self.now = Instant::now();
            for event in events.iter().take(count) {
                match event.data() {
                    TOKEN_WAKE => self.release_realised(),
                    token => match usize::try_from(TOKEN_LISTENER - token) {
                        Ok(listener) if listener < self.listeners.len() => self.queries(listener),
                        _ => self.answers(Key::from_u64(token)),
                    },
                }
            }
            self.on_time();
            if self.control.is_stopped() || self.may_leave() {
                break;
            }
        }
        if let Some(member) = &mut self.member {
            member.leave();
        }
        let left = self.upstream.in_flight() + self.held.len();
        for _ in 0..self.upstream.in_flight() {
            self.proxy.stats().in_flight.down();
        }
        for _ in 0..self.held.len() {
            self.proxy.stats().held.down();
        }
        self.control.finish(u64::try_from(left).unwrap_or(u64::MAX));
    }

    /// Takes queries from a listener and sends them on.
    fn queries(&mut self, listener: usize) {
        for _ in 0..ROUNDS {
            let Some(Listener { fd, .. }) = self.listeners.get(listener) else {
                return;
            };
            // Any error but "nothing there" concerns an earlier datagram; the socket goes on.
            let Ok(received) = self.recv.recv(fd) else {
                return;
            };
            if let Some(leaving) = &mut self.leaving {
                leaving.packet(self.now);
            }
            self.count_overflow(listener);
            let mut placed: [Option<(Placed, usize)>; BATCH] = [None; BATCH];
            let mut count = 0;
            for at in 0..received {
                if let Some(found) = self.query(at)
                    && let Some(slot) = placed.get_mut(count)
                {
                    *slot = Some((found, at));
                    count += 1;
                }
            }
            let placed = placed.get_mut(..count).unwrap_or_default();
            placed.sort_unstable_by_key(|p| p.map(|(p, _)| p.socket));
            let same_socket = |a: &Option<(Placed, usize)>, b: &Option<(Placed, usize)>| {
                a.map(|(p, _)| p.socket) == b.map(|(p, _)| p.socket)
            };
            for group in placed.chunk_by(same_socket) {
                self.forward(group);
            }
            if received < BATCH {
                return;
            }
        }
    }

    /// Judges one query. A place, if it is to be sent on as it lies in the batch.
    fn query(&mut self, at: usize) -> Option<Placed> {
        let stats = self.proxy.stats();
        stats.transports.inc(Protocol::Udp);
        let server = match self.options {
            SocketOptions::Transparent => self.recv.original(at),
            SocketOptions::Plain { server } => Some(server),
        };
        let (Some(client), Some(server)) = (self.recv.from(at), server) else {
            stats.queries.inc(QueryResult::NoDestination);
            return None;
        };
        let arrival = Arrival {
            client,
            server,
            transport: Transport::Udp,
        };
        match self
            .proxy
            .query(self.recv.bytes(at), &arrival, &mut self.own)
        {
            Outcome::Ignore => None,
            Outcome::Reply => {
                self.send_own(server, client);
                None
            }
            Outcome::Forward(query) => {
                let place = self
                    .upstream
                    .place(&query, (client, server), self.now, &self.epoll);
                let placed = match place {
                    Ok(placed) => placed,
                    Err(error) => {
                        let (id, flags) = (query.id, query.flags);
                        let code = Rcode::ServFail;
                        reply::to_question(id, flags, query.question, code, &mut self.own);
                        self.not_sent(&error);
                        self.send_own(server, client);
                        return None;
                    }
                };
                self.proxy.stats().in_flight.up();
                if let Some(edns) = query.hop_by_hop {
                    self.own.clear();
                    self.own.extend_from_slice(self.recv.bytes(at));
                    edns.strip_keepalive(&mut self.own);
                    set_id(&mut self.own, placed.id);
                    self.forward_own(placed);
                    return None;
                }
                set_id(self.recv.bytes_mut(at), placed.id);
                Some(placed)
            }
        }
    }

    /// Sends a group of queries that share a socket.
    fn forward(&mut self, group: &[Option<(Placed, usize)>]) {
        let empty = Datagram {
            bytes: &[],
            to: None,
            source: None,
        };
        let mut batch = [empty; BATCH];
        let mut len = 0;
        let mut socket = None;
        for (slot, (placed, at)) in batch.iter_mut().zip(group.iter().flatten()) {
            *slot = Datagram {
                bytes: self.recv.bytes(*at),
                to: None,
                source: None,
            };
            socket = self.upstream.fd(placed.socket);
            len += 1;
        }
        let mut failed = [false; BATCH];
        if let Some(socket) = socket {
            send_all(socket, batch.get(..len).unwrap_or_default(), |at| {
                if let Some(failed) = failed.get_mut(at) {
                    *failed = true;
                }
            });
        }
        for ((placed, _), failed) in group.iter().flatten().zip(failed) {
            if failed {
                self.give_up(*placed);
            }
        }
    }

    /// Sends the query in `own`.
    fn forward_own(&mut self, placed: Placed) {
        let datagram = Datagram {
            bytes: &self.own,
            to: None,
            source: None,
        };
        let socket = self.upstream.fd(placed.socket);
        if socket.is_some_and(|socket| send_all(socket, &[datagram], |_| {}) > 0) {
            self.give_up(placed);
        }
    }

    /// Answers SERVFAIL to a query that could not be sent.
    fn give_up(&mut self, placed: Placed) {
        let Some(flight) = self.upstream.remove(placed.flight) else {
            return;
        };
        self.proxy.stats().in_flight.down();
        self.proxy.stats().queries.inc(QueryResult::UpstreamError);
        self.servfail(&flight);
        self.send_own(flight.server, flight.client);
        self.upstream.recycle(flight);
    }

    fn servfail(&mut self, flight: &Flight) {
        let Flight {
            client_id,
            flags,
            question,
            ..
        } = flight;
        reply::to_question(*client_id, *flags, question, Rcode::ServFail, &mut self.own);
    }

    fn not_sent(&self, error: &PlaceError) {
        let result = match error {
            PlaceError::Full => QueryResult::Shed,
            PlaceError::Socket(e) => {
                tracing::debug!(error = %e, "no upstream socket");
                QueryResult::UpstreamError
            }
        };
        self.proxy.stats().queries.inc(result);
    }

    /// Takes answers from an upstream socket and releases or holds them.
    fn answers(&mut self, socket: Key) {
        for _ in 0..ROUNDS {
            let Some(fd) = self.upstream.fd(socket) else {
                return;
            };
            let received = match self.recv.recv(fd) {
                Ok(received) => received,
                // An ICMP error: reading it took it away, and the others wait on.
                Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => continue,
                Err(_) => return,
            };
            let mut now_out: [Option<(usize, SocketAddr)>; BATCH] = [None; BATCH];
            let mut sender = None;
            for (at, out) in (0..received).zip(&mut now_out) {
                let Some(flight) = self.upstream.answered(socket, self.recv.bytes(at)) else {
                    self.proxy.stats().answers.inc(AnswerResult::Unexpected);
                    continue;
                };
                if self.answer(at, &flight) {
                    *out = Some((at, flight.client));
                    sender = Some((flight.server, flight.client));
                }
                self.upstream.recycle(flight);
            }
            if let Some((server, client)) = sender {
                let out = now_out.iter().flatten();
                let wanted = out.clone().count();
                let answers = out.map(|(at, client)| (self.recv.bytes(*at), *client));
                let listener = listener_for(&self.listeners, client);
                let sent = self.replies.send(server, answers, listener, self.now);
                self.count_unsent(wanted, sent);
            }
            if received < BATCH {
                return;
            }
        }
    }

    /// Learns from one answer. Whether it is to be sent now, as it lies in the batch.
    fn answer(&mut self, at: usize, flight: &Flight) -> bool {
        let stats = self.proxy.stats();
        stats.in_flight.down();
        stats
            .upstream_time
            .observe(self.now.duration_since(flight.sent_at));
        set_id(self.recv.bytes_mut(at), flight.client_id);
        let asked = Asked {
            question: &flight.question,
            endpoint: flight.endpoint,
            server: flight.server,
            transport: Transport::Udp,
        };
        let mut place = None;
        let has_room = self.held.has_room();
        let (held, control) = (&mut self.held, &self.control);
        let answered = self
            .proxy
            .answer(&asked, self.recv.bytes(at), BootTime::now(), || {
                if !has_room {
                    return Box::new(|_| {});
                }
                let key = held.reserve();
                place = Some(key);
                let control = Arc::clone(control);
                Box::new(move |realised| control.realised(key, realised))
            });
        let copy = |recv: &RecvBatch| {
            let mut bytes = recv.bytes(at).to_vec();
            if let Some(edns) = &answered.hop_by_hop {
                edns.strip_keepalive(&mut bytes);
            }
            bytes
        };
        match (answered.fate, place) {
            (Fate::Hold, Some(key)) => {
                let bytes = copy(&self.recv);
                let Flight { client, server, .. } = *flight;
                self.held.hold(
                    key,
                    HeldAnswer {
                        bytes,
                        client,
                        server,
                        since: self.now,
                    },
                );
                self.proxy.stats().held.up();
                return false;
            }
            (Fate::Malformed, _) => {
                self.proxy.stats().answers.inc(AnswerResult::Malformed);
                self.servfail(flight);
                self.send_own(flight.server, flight.client);
                return false;
            }
            (Fate::Hold, None) => self.proxy.stats().answers.inc(AnswerResult::HeldFull),
            (Fate::Release(result), place) => {
                if let Some(key) = place {
                    self.held.take(key);
                }
                self.proxy.stats().answers.inc(result);
            }
        }
        if answered.hop_by_hop.is_some() {
            self.own = copy(&self.recv);
            self.send_own(flight.server, flight.client);
            return false;
        }
        true
    }

    /// Releases held answers whose fate has become known.
    fn release_realised(&mut self) {
        let mut realised = std::mem::take(&mut self.realised);
        self.control.take_realised(&mut realised);
        for (key, realised) in realised.drain(..) {
            if let Some(answer) = self.held.take(key) {
                let result = match realised {
                    Realised::Yes => AnswerResult::Realised,
                    Realised::No(_) => AnswerResult::NotRealised,
                    Realised::AgentAway => AnswerResult::AgentAway,
                };
                self.release(&answer, result);
            }
        }
        self.realised = realised;
    }

    fn release(&mut self, answer: &HeldAnswer, result: AnswerResult) {
        let stats = self.proxy.stats();
        stats.held.down();
        stats
            .held_time
            .observe(self.now.duration_since(answer.since));
        stats.answers.inc(result);
        let one = std::iter::once((answer.bytes.as_slice(), answer.client));
        let listener = listener_for(&self.listeners, answer.client);
        let sent = self.replies.send(answer.server, one, listener, self.now);
        self.count_unsent(1, sent);
    }

    /// Sends the answer in `own`.
    fn send_own(&mut self, server: SocketAddr, client: SocketAddr) {
        let one = std::iter::once((self.own.as_slice(), client));
        let listener = listener_for(&self.listeners, client);
        let sent = self.replies.send(server, one, listener, self.now);
        self.count_unsent(1, sent);
    }

    fn count_unsent(&self, wanted: usize, sent: Result<usize, socket::SocketError>) {
        let sent = sent.unwrap_or_else(|e| {
            tracing::warn!(error = %e, "answers cannot be sent");
            0
        });
        let unsent = u64::try_from(wanted.saturating_sub(sent)).unwrap_or(u64::MAX);
        self.proxy
            .stats()
            .answers
            .add(AnswerResult::SendFailed, unsent);
    }

    fn count_overflow(&mut self, listener: usize) {
        let (Some(total), Some(listener)) = (self.recv.overflow, self.listeners.get_mut(listener))
        else {
            return;
        };
        let new = total.wrapping_sub(listener.overflow);
        listener.overflow = total;
        self.proxy.stats().receive_overflow.add(u64::from(new));
    }

    /// Everything that is due.
    fn on_time(&mut self) {
        while let Some(answer) = self.held.expired(self.now) {
            self.release(&answer, AnswerResult::Late);
        }
        while let Some(flight) = self.upstream.expired(self.now) {
            self.proxy.stats().in_flight.down();
            self.proxy.stats().upstream_timeouts.add(1);
            self.upstream.recycle(flight);
        }
        if self.now >= self.next_sweep {
            self.next_sweep = self.now + SWEEP;
            self.upstream.sweep(self.now);
        }
        if let Some(member) = &mut self.member {
            member.beat(self.now);
        }
    }

    fn may_leave(&mut self) -> bool {
        if !self.control.is_draining() {
            return false;
        }
        let now = self.now;
        if self.leaving.is_none() {
            if let Some(member) = &mut self.member {
                member.leave();
            }
            for listener in &self.listeners {
                if let Err(e) = socket::deafen(&listener.fd, listener.ipv6) {
                    tracing::warn!(error = %e, "a listener that drains still gets new queries");
                }
            }
        }
        let leaving = self.leaving.get_or_insert_with(|| Leaving::new(now));
        leaving.is_quiet(now) && self.upstream.in_flight() == 0 && self.held.len() == 0
    }

    fn timeout(&mut self) -> EpollTimeout {
        let mut next = self.next_sweep;
        let due = [
            self.held.next_deadline(),
            self.upstream.next_deadline(),
            self.member.as_ref().map(Member::next_beat),
            self.control.is_draining().then(|| self.now + Leaving::TICK),
        ];
        for due in due.into_iter().flatten() {
            next = next.min(due);
        }
        let left = next.saturating_duration_since(Instant::now());
        // Rounded up, so that what is due is due when we wake.
        let millis = u16::try_from(left.as_micros().div_ceil(1000)).unwrap_or(u16::MAX);
        EpollTimeout::from(millis)
    }
}

/// The listener of the family of `peer`.
fn listener_for(listeners: &[Listener], peer: SocketAddr) -> &OwnedFd {
    let same = listeners.iter().find(|l| l.ipv6 == peer.is_ipv6());
    &same
        .or(listeners.first())
        .expect("a worker has at least one listener")
        .fd
}
