//! The sockets: their selection for a query, their replacement, and the limits for each endpoint.

use std::{
    collections::HashMap,
    net::SocketAddr,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use foldhash::quality::RandomState;
use limits::quota::Holder;
use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};
use rand::{Rng as _, rngs::StdRng};
use shared_maps::IdentityId;

use super::{RegisterError, UdpUpstream};
use crate::{arena::Key, query::pending::PendingQuery, socket, stats::Fallback, transparent};

/// Maximum number of sockets per server and identity. Another socket is opened when [`ROOM`]
/// answers are expected on each of the others.
const MOST: usize = 32;
/// Number of answers that fit into a socket's receive buffer if all arrive while the worker does
/// not run.
const ROOM: usize = 128;
/// Maximum number of sockets per worker with the node's address. An endpoint may have as
/// many sockets that wait for answers as there are sockets that do not, so that silent servers stop
/// only their clients.
const MAX_SOCKETS: usize = 512;
/// Maximum number of sockets per worker with pods' addresses, with the same shares.
pub(super) const MAX_TRANSPARENT: usize = 2048;
/// Number of queries after which a socket is replaced.
const MAX_QUERIES: u32 = 10_000;
/// Age at which a socket is replaced. For the address of a Service, the node's connection tracking
/// keeps a socket at the pod to which its first query went. A pod that ends continues to answer for
/// a few seconds (CoreDNS: `lameduck 5s`), while new sockets go to other pods. A socket must be
/// younger than that time.
const MAX_AGE: Duration = Duration::from_secs(2);
/// Time without an answer to a waiting query after which later queries get another socket: the pod
/// behind this socket may have ended without a message. The time doubles with each such successor
/// until an answer comes, so that a silent server costs few sockets.
pub(super) const PATIENCE: Duration = Duration::from_millis(300);
/// From this number of queries or this age on, a successor is opened when there is nothing left to
/// send. Otherwise a query would have to wait for the eight system calls that open it.
const QUERIES_AHEAD: u32 = MAX_QUERIES - MAX_QUERIES / 8;
const AGE_AHEAD: Duration = Duration::from_secs(1);

/// A socket to a server, and the queries that wait on it.
pub(super) struct UpSocket {
    pub(super) fd: OwnedFd,
    pub(super) server: ServerKey,
    pub(super) opener: Holder,
    pub(super) waiting: HashMap<u16, Key, RandomState>,
    pub(super) born: Instant,
    pub(super) used: Instant,
    pub(super) queries: u32,
    /// While queries wait: the time since which none was answered.
    pub(super) silent_since: Option<Instant>,
    /// Time for which the socket may be silent.
    pub(super) patience: Duration,
    /// Whether the socket's successor has to be opened.
    pub(super) aging: bool,
    /// Whether the socket takes no new queries and is closed when no query waits.
    pub(super) retired: bool,
    /// For a flow's socket without waiting queries: its number among the idle sockets.
    pub(super) idle: Option<u64>,
}

impl UpSocket {
    /// A random id that no query on this socket has.
    pub(super) fn free_id(&self, random: &mut StdRng) -> u16 {
        loop {
            let id = random.random();
            if !self.waiting.contains_key(&id) {
                return id;
            }
        }
    }

    /// Whether it is time to open the socket's successor. Returns true once.
    pub(super) fn begins_to_age(&mut self, now: Instant) -> bool {
        // A flow has one socket only.
        let is_old = !self.server.is_flow() && self.is_old(now);
        let begins = is_old && !self.aging;
        self.aging |= is_old;
        begins
    }

    /// Records that an answer arrived at `now`.
    pub(super) fn answers(&mut self, now: Instant) {
        self.silent_since = Some(now);
        self.patience = PATIENCE;
    }

    /// Whether the socket's server, or the path to it, seems to be gone.
    fn is_silent(&self, now: Instant) -> bool {
        let since = self.silent_since;
        since.is_some_and(|since| now.duration_since(since) >= self.patience)
    }

    fn is_old(&self, now: Instant) -> bool {
        self.queries >= QUERIES_AHEAD || now.duration_since(self.born) >= AGE_AHEAD
    }
}

/// The server, and the identity and source address of the queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ServerKey {
    pub(super) server: SocketAddr,
    pub(super) identity: Option<IdentityId>,
    /// Source address; `None` for the node's. Port 0: the kernel selects one.
    pub(super) source: Option<SocketAddr>,
}

impl ServerKey {
    /// Whether the socket belongs to one flow of a client and has the client's own port.
    pub(super) fn is_flow(&self) -> bool {
        self.source.is_some_and(transparent::is_flow)
    }
}

impl UdpUpstream {
    /// A socket with the address `source`, or with the node's address if that fails.
    pub(super) fn socket_under(
        &mut self,
        source: Option<SocketAddr>,
        of: impl Fn(Option<SocketAddr>) -> ServerKey,
        opener: Holder,
        now: Instant,
        epoll: &Epoll,
    ) -> Result<Key, RegisterError> {
        let wanted = of(source);
        let found = match wanted.is_flow() {
            true => self.socket_of_flow(wanted, opener, now, epoll),
            false => self.socket_for(wanted, opener, now, epoll),
        };
        let reason = match found {
            Err(RegisterError::Full) if source.is_some() => Fallback::TooManySockets,
            Err(RegisterError::Socket(error)) if source.is_some() => Fallback::of(&error.source),
            found => return found,
        };
        self.fallbacks.inc(reason);
        self.socket_for(of(None), opener, now, epoll)
    }

    fn socket_for(
        &mut self,
        server: ServerKey,
        opener: Holder,
        now: Instant,
        epoll: &Epoll,
    ) -> Result<Key, RegisterError> {
        let at = self.position(server);
        let old = self.at(server, at);
        if let Some(key) = old
            && let Some(socket) = self.sockets.get(key)
            && socket.queries < MAX_QUERIES
            && now.duration_since(socket.born) < MAX_AGE
            && !socket.is_silent(now)
        {
            return Ok(key);
        }
        match self.open_at((server, opener), at, now, epoll) {
            // A socket that is old or has many waiting queries is better than no socket.
            Err(RegisterError::Full) => self.any_to(server).ok_or(RegisterError::Full),
            opened => {
                if let (Ok(_), Some(old)) = (&opened, old) {
                    self.retire(old);
                }
                opened
            }
        }
    }

    /// Index of the server's socket for the next query.
    fn position(&self, server: ServerKey) -> usize {
        let has_room = |at: &usize| {
            let socket = self.at(server, *at).and_then(|key| self.sockets.get(key));
            socket.is_none_or(|socket| socket.waiting.len() < ROOM)
        };
        if has_room(&self.spread) {
            return self.spread;
        }
        (0..MOST).find(has_room).unwrap_or(self.spread)
    }

    /// Selects a place without a socket for the next query, if the query's server has such a place.
    pub(super) fn spread_to_free<Q>(&mut self, query: &PendingQuery<Q>) {
        let server = ServerKey {
            server: query.from.server,
            identity: self.marked.then_some(query.identities.client),
            source: query.source,
        };
        let sockets = self.servers.get(&server);
        let free = sockets.and_then(|all| all.iter().position(Option::is_none));
        self.spread = free.unwrap_or(self.spread);
    }

    fn at(&self, server: ServerKey, at: usize) -> Option<Key> {
        self.servers.get(&server)?.get(at).copied().flatten()
    }

    fn any_to(&self, server: ServerKey) -> Option<Key> {
        let all = self.servers.get(&server)?;
        self.at(server, self.spread)
            .or_else(|| all.iter().copied().flatten().next())
    }

    fn open_at(
        &mut self,
        (server, opener): (ServerKey, Holder),
        at: usize,
        now: Instant,
        epoll: &Epoll,
    ) -> Result<Key, RegisterError> {
        self.make_room(server.source.is_some(), opener)?;
        let fd = self.open(server)?;
        let key = self.watch(fd, (server, opener), now, epoll)?;
        let old = self.at(server, at).and_then(|old| self.sockets.get(old));
        let old = old.filter(|old| old.is_silent(now));
        let patience = old.map_or(PATIENCE, |old| (2 * old.patience).min(MAX_AGE));
        if let Some(socket) = self.sockets.get_mut(key) {
            socket.patience = patience;
        }
        let own = self.servers.entry(server).or_default();
        if own.len() <= at {
            own.resize(at + 1, None);
        }
        if let Some(place) = own.get_mut(at) {
            *place = Some(key);
        }
        Ok(key)
    }

    /// Adds an open socket to `epoll`.
    pub(super) fn watch(
        &mut self,
        fd: OwnedFd,
        (server, opener): (ServerKey, Holder),
        now: Instant,
        epoll: &Epoll,
    ) -> Result<Key, socket::SocketError> {
        let key = self.sockets.insert(UpSocket {
            fd,
            server,
            opener,
            waiting: HashMap::default(),
            born: now,
            used: now,
            queries: 0,
            silent_since: None,
            patience: PATIENCE,
            aging: false,
            retired: false,
            idle: None,
        });
        if let Some(socket) = self.sockets.get(key) {
            let event = EpollEvent::new(EpollFlags::EPOLLIN, key.to_u64());
            if let Err(e) = epoll.add(&socket.fd, event) {
                self.sockets.remove(key);
                return Err(socket::SocketError {
                    what: "cannot watch a socket (epoll)",
                    source: e.into(),
                });
            }
        }
        Ok(key)
    }

    fn open(&mut self, key: ServerKey) -> Result<OwnedFd, socket::SocketError> {
        let ServerKey {
            server, identity, ..
        } = key;
        let Some(source) = key.source else {
            return socket::udp_upstream(server, identity, None);
        };
        let is_taken = |e: &socket::SocketError| Fallback::of(&e.source) == Fallback::NoPort;
        let at = |source| socket::udp_upstream(server, identity, Some(source));
        let refused = match at(source) {
            Err(e) if is_taken(&e) => e,
            opened => return opened,
        };
        let others = transparent::sources(source, &mut self.random);
        for source in others.into_iter().skip(1) {
            match at(source) {
                Err(e) if is_taken(&e) => {}
                opened => {
                    if opened.is_ok() {
                        self.fallbacks.inc(Fallback::OtherPort);
                    }
                    return opened;
                }
            }
        }
        Err(refused)
    }

    /// Checks whether `opener` may open one more socket. At the limit, the socket that has been
    /// idle for longest is closed.
    fn make_room(&mut self, transparent: bool, opener: Holder) -> Result<(), RegisterError> {
        let most = if transparent {
            MAX_TRANSPARENT
        } else {
            MAX_SOCKETS
        };
        let (mut waiting, mut own) = (0, 0);
        let (mut all, mut idle) = (0, None::<(Instant, Key)>);
        let alike = |socket: &UpSocket| {
            socket.server.source.is_some() == transparent && !socket.server.is_flow()
        };
        for (key, socket) in self.sockets.iter().filter(|(_, s)| alike(s)) {
            all += 1;
            if !socket.waiting.is_empty() {
                waiting += 1;
                own += usize::from(socket.opener == opener);
            } else if idle.is_none_or(|(used, _)| socket.used < used) {
                idle = Some((socket.used, key));
            }
        }
        if own >= most.saturating_sub(waiting) {
            return Err(RegisterError::Full);
        }
        if all >= most
            && let Some((_, key)) = idle
        {
            self.close(key);
        }
        Ok(())
    }

    /// Replaces one of the sockets that will soon be too old. Call this when there is nothing left
    /// to send.
    pub(crate) fn renew(&mut self, now: Instant, epoll: &Epoll) {
        let Some(old) = self.aging.pop() else { return };
        let Some(socket) = self.sockets.get(old) else {
            return;
        };
        let (server, opener) = (socket.server, socket.opener);
        let own = self.servers.get(&server);
        let Some(at) = own.and_then(|own| own.iter().position(|key| *key == Some(old))) else {
            return;
        };
        // If this fails, the old socket is used until a query finds it too old.
        if self.open_at((server, opener), at, now, epoll).is_ok() {
            self.retire(old);
        }
    }

    /// Retires a socket: later queries get another one. Queries in flight on it may still be
    /// answered.
    pub(crate) fn retire(&mut self, key: Key) {
        self.forget(key);
        let Some(socket) = self.sockets.get_mut(key) else {
            return;
        };
        socket.retired = true;
        if socket.waiting.is_empty() {
            self.sockets.remove(key);
        }
    }

    pub(super) fn close(&mut self, key: Key) {
        self.forget(key);
        if let Some(socket) = self.sockets.remove(key) {
            self.flows.closed(&socket);
        }
    }

    /// Removes the socket from the tables, so that no new query finds it.
    fn forget(&mut self, key: Key) {
        let Some(server) = self.sockets.get(key).map(|s| s.server) else {
            return;
        };
        if let Some(spread) = self.servers.get_mut(&server) {
            for slot in spread.iter_mut().filter(|s| **s == Some(key)) {
                *slot = None;
            }
            if spread.iter().all(Option::is_none) {
                self.servers.remove(&server);
            }
        }
    }
}
