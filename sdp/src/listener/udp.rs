//! One UDP worker: a thread whose sockets and queries in flight are its own, without locks. Other
//! threads can release its held answers ([`super::releases`]).
//!
//! Everything happens in [`Worker::run`]: wait, receive a batch of queries or answers, judge each,
//! send the results in batches.

mod answers;
mod clients;
mod queries;
mod undelivered;

use std::{
    io,
    net::SocketAddr,
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use dns_policy::mapping::Realised;
use dns_wire::{edns::Edns, set_id};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use self::clients::{Clients, Listener};
use super::{
    SocketOptions,
    control::{Control, Leaving},
    delayed::{self, Delayed, Next},
    in_flight::InFlight,
    releases::Releases,
};
use crate::{
    arena::Key,
    mapping::repeat::Repeats,
    proxy::Proxy,
    resolve::LookupCache,
    shared_tasks,
    socket::sys::{BATCH, RecvBatch, SendBatch},
    steering::Member,
    upstream::udp::{FlightRef, UdpUpstream},
};

/// Number of batches that are read from one socket before the other sockets are read.
const ROUNDS: usize = 4;
/// After this many datagrams in one turn, the worker yields the CPU so that their receivers run.
/// The next batch is then larger, and a large batch costs about as much as a small one.
const BUSY: usize = 8;
/// Maximum number of events that are read from the kernel at once.
const EVENTS: usize = 64;
/// Interval at which idle sockets are closed.
const SWEEP: Duration = Duration::from_secs(5);
/// Epoll token of the control descriptor. The upper half of an upstream socket's token is its
/// generation, which never gets that high.
const TOKEN_WAKE: u64 = u64::MAX;
/// Epoll token of the first listener. The second listener's token is one less.
const TOKEN_LISTENER: u64 = u64::MAX - 1;

/// Memory that is used again for each batch.
struct Buffers {
    /// Messages from servers.
    answers: RecvBatch,
    /// Arguments of the calls that send queries to servers.
    send: SendBatch,
    lookups: LookupCache,
    /// Queries of a batch to be sent on, with their positions in it.
    registered: Vec<(FlightRef, usize)>,
    /// Answers of a batch to be released: the position in the batch, and the client.
    released: Vec<(usize, SocketAddr)>,
    realised: Vec<(Key, Realised)>,
    /// The proxy's own answers, and changed copies of messages.
    own: Vec<u8>,
}

impl Buffers {
    fn new() -> Self {
        Self {
            answers: RecvBatch::connected(),
            send: SendBatch::segmenting(),
            lookups: LookupCache::default(),
            registered: Vec::with_capacity(BATCH),
            released: Vec::with_capacity(BATCH),
            realised: Vec::new(),
            own: Vec::new(),
        }
    }

    /// Copies a query for a server into `own`. `edns` is its OPT record, if it carries an option
    /// that must not be passed on.
    fn copy_query(&mut self, message: &[u8], edns: Option<&Edns>, id: u16) {
        self.own.clear();
        self.own.extend_from_slice(message);
        if let Some(edns) = edns {
            edns.strip_keepalive(&mut self.own);
        }
        set_id(&mut self.own, id);
    }
}

/// State of one worker thread, with its sockets and queries.
pub(super) struct Worker {
    proxy: Arc<Proxy>,
    control: Arc<Control>,
    epoll: Epoll,
    clients: Clients,
    buffers: Buffers,
    repeats: Repeats,
    upstream: UdpUpstream,
    in_flight: InFlight,
    delayed: Delayed,
    releases: Arc<Releases>,
    member: Option<Member>,
    leaving: Option<Leaving>,
    next_sweep: Instant,
    now: Instant,
    /// Datagrams received in this turn. After [`BUSY`] of them the thread yields the CPU.
    taken: usize,
}

impl Worker {
    /// `in_flight`: the limit that all workers and TCP divide.
    pub(super) fn new(
        proxy: Arc<Proxy>,
        control: Arc<Control>,
        options: SocketOptions,
        sockets: Vec<(OwnedFd, bool)>,
        in_flight: InFlight,
        member: Option<Member>,
    ) -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let readable = |token| EpollEvent::new(EpollFlags::EPOLLIN, token);
        epoll.add(control.descriptor(), readable(TOKEN_WAKE))?;
        let mut listeners = Vec::new();
        for ((fd, ipv6), below) in sockets.into_iter().zip(0..) {
            epoll.add(&fd, readable(TOKEN_LISTENER - below))?;
            listeners.push(Listener {
                fd: Arc::new(fd),
                ipv6,
                overflow: 0,
            });
        }
        let marked = options == SocketOptions::Transparent;
        let now = Instant::now();
        let ways = listeners.iter();
        let ways = ways.map(|listener| (Arc::clone(&listener.fd), listener.ipv6));
        let releases = Releases::new(
            Arc::clone(&proxy),
            Arc::clone(&control),
            options,
            ways.collect(),
        );
        Ok(Self {
            upstream: UdpUpstream::new(
                marked,
                in_flight.udp_limit(),
                proxy.config().timeout,
                proxy.stats().fallbacks.clone(),
            ),
            in_flight,
            delayed: Delayed::new(proxy.config().in_flight_grace, proxy.config().rules_wait),
            releases: Arc::new(releases),
            proxy,
            control,
            epoll,
            clients: Clients::new(options, listeners),
            buffers: Buffers::new(),
            repeats: Repeats::new(),
            member,
            leaving: None,
            next_sweep: now + SWEEP,
            now,
            taken: 0,
        })
    }

    /// Works until it is stopped or drained.
    pub(super) fn run(mut self) {
        shared_tasks::this_thread_polls();
        self.control.runs_here();
        let mut events = [EpollEvent::empty(); EVENTS];
        loop {
            let timeout = self.timeout();
            self.control.sleeps(true);
            let waited = self.epoll.wait(&mut events, timeout);
            self.control.sleeps(false);
            let count = match waited {
                Ok(count) => count,
                Err(nix::errno::Errno::EINTR) => 0,
                Err(e) => {
                    tracing::error!(error = %e, "DNS worker stopped: it cannot wait for events");
                    break;
                }
            };
            self.now = Instant::now();
            for event in events.iter().take(count) {
                match event.data() {
                    TOKEN_WAKE => {
                        self.control.woken();
                        self.release_realised();
                    }
                    token => match usize::try_from(TOKEN_LISTENER - token) {
                        Ok(listener) if listener < self.clients.listeners.len() => {
                            self.queries(listener)
                        }
                        _ => self.server_event(*event),
                    },
                }
            }
            self.on_time();
            self.exchange();
            if std::mem::take(&mut self.taken) >= BUSY {
                std::thread::yield_now();
            }
            if self.control.is_stopped() || self.may_leave() {
                break;
            }
        }
        if let Some(member) = &mut self.member {
            member.leave();
        }
        let held = self.releases.held().len();
        let left = self.upstream.in_flight() + held + self.delayed.len();
        self.abandon();
        self.control.finish(u64::try_from(left).unwrap_or(u64::MAX));
    }

    /// Sends new mappings. If an answer waits for a result, also receives the available results
    /// without waiting for the link's thread.
    fn exchange(&mut self) {
        if self.releases.held().len() == 0 {
            self.proxy.sink().push();
            return;
        }
        self.proxy.sink().exchange();
        // Results that this thread received itself cause no event.
        self.release_realised();
    }

    /// Drops the unfinished queries and answers when the time for the drain is over.
    fn abandon(&mut self) {
        let (observer, now) = (self.proxy.observer(), self.now);
        while let Some(query) = self.delayed.any() {
            query.act(|mut query, _| observer.cut(&mut query, now));
        }
        while let Some(mut flight) = self.upstream.any() {
            observer.cut(&mut flight.query, now);
        }
        let mut held = self.releases.held();
        while let Some(mut answer) = held.any() {
            observer.cut_held(&mut answer, now);
        }
    }

    /// Sends the answer in `own`.
    fn send_own(&mut self, server: SocketAddr, client: SocketAddr) {
        let one = std::iter::once((self.buffers.own.as_slice(), client));
        self.clients
            .send(&self.proxy, (server, client), one, self.now);
    }

    /// Handles everything that is due: deadlines, retries, sweeps and the heartbeat.
    fn on_time(&mut self) {
        self.release_late();
        while let Some(mut flight) = self.upstream.expired(self.now) {
            self.proxy.observer().timed_out(&mut flight.query, self.now);
            self.upstream.recycle(flight.query.question);
        }
        if !self.delayed.is_empty() {
            self.retry_delayed();
        }
        self.upstream.renew(self.now, &self.epoll);
        self.upstream.close_idle_flows(self.now);
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
            self.clients.deafen();
            self.control.leave();
        }
        let leaving = self.leaving.get_or_insert_with(|| Leaving::new(now));
        let waits = !self.delayed.is_empty() || self.releases.held().len() > 0;
        leaving.is_quiet(now) && self.upstream.in_flight() == 0 && !waits
    }

    fn timeout(&mut self) -> EpollTimeout {
        let mut next = self.next_sweep;
        let due = [
            self.releases.held().next_deadline(),
            self.upstream.next_deadline(),
            self.member.as_ref().map(Member::next_beat),
            self.control.is_draining().then(|| self.now + Leaving::TICK),
            (!self.delayed.is_empty()).then(|| self.now + delayed::RETRY),
        ];
        for due in due.into_iter().flatten() {
            next = next.min(due);
        }
        let left = next.saturating_duration_since(Instant::now());
        // Rounded up, so that the deadline has passed when the worker wakes up.
        let millis = u16::try_from(left.as_micros().div_ceil(1000)).unwrap_or(u16::MAX);
        EpollTimeout::from(millis)
    }
}
