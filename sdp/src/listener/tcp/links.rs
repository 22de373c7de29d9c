//! Connections from the proxy to a DNS server, for the queries of one client connection.
//!
//! While queries wait for answers, a connection of the pod's pool is lent to this client connection
//! and to no other. So a client that does not read its answers, or a name that takes long, delays
//! no other client.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use limits::quota::Holder;
use parking_lot::Mutex;
use shared_maps::IdentityId;

use super::{
    pool::{Pool, Taken, Target},
    upstream::{TcpUpstream, UpstreamEvent, UpstreamIdentity},
};
use crate::{
    proxy::Proxy,
    stats::{Count, Counters, Fallback, Level},
};

/// Memory in bytes that an idle connection may use.
const IDLE_MEMORY: usize = 16 * 1024;
/// Age at which a connection is not used again. The connections of a busy pod thus spread over the
/// pods of a DNS server's Service, also over new ones.
const MAX_AGE: Duration = Duration::from_secs(60);
/// Maximum number of unanswered queries with which a connection may be used again.
const MAX_UNANSWERED: usize = 64;
/// How often idle connections are examined.
pub(super) const EXAMINED_EVERY: Duration = Duration::from_millis(500);

/// Connections to servers of all client connections.
pub(super) struct ServerConnections {
    pool: Mutex<Pool<TcpUpstream>>,
    /// Connections that have a permit.
    open: Level,
    made: Count,
    fallbacks: Counters<Fallback>,
    /// How long a query waits for its answer.
    timeout: Duration,
    /// How long a connection without queries stays open.
    idle: Duration,
}

impl ServerConnections {
    /// Connections to servers: at most `limit` for all pods together.
    pub(super) fn new(limit: usize, proxy: &Proxy) -> Self {
        let stats = proxy.stats();
        Self {
            pool: Mutex::new(Pool::new(limit)),
            open: stats.server_connections.clone(),
            made: stats.server_connections_made.clone(),
            fallbacks: stats.fallbacks.clone(),
            timeout: proxy.config().timeout,
            idle: proxy.config().server_idle,
        }
    }

    /// Closes idle connections whose time is over or whose server closed them.
    pub(super) fn examine(&self, now: Instant) {
        let over = self.pool.lock().expire(now, |upstream| {
            upstream.read_late_answers().ok()?;
            (upstream.memory() <= IDLE_MEMORY).then_some(upstream.unanswered())
        });
        for upstream in over {
            self.close(upstream);
        }
    }

    fn close(&self, upstream: TcpUpstream) {
        drop(upstream);
        self.open.down();
    }
}

impl Drop for ServerConnections {
    fn drop(&mut self) {
        for upstream in self.pool.get_mut().clear() {
            drop(upstream);
            self.open.down();
        }
    }
}

/// The connection that a query uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Via {
    /// A connection of the pod's pool.
    Lent,
    /// A connection that no other client ever uses: for a zone transfer, or from the client's own
    /// address.
    Own,
}

/// A connection that a query needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub(super) via: Via,
    pub(super) holder: Holder,
    /// Identity of the pod. A connection is used under one identity only.
    pub(super) identity: IdentityId,
    pub(super) pod: UpstreamIdentity,
}

/// The pod already has all the connections that it may have.
#[derive(Debug)]
pub(super) struct NoConnection;

/// Whether the queries of a lost connection may be sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Loss {
    /// Always: the connection was older than the queries, or it has brought answers.
    Usual,
    /// Only once for each query: a new connection ended without an answer.
    Unserved,
}

/// Connections of one client connection.
pub(super) struct Links {
    server: SocketAddr,
    all: Arc<ServerConnections>,
    lent: Option<Link>,
    own: Option<Link>,
}

/// A connection that queries of this client use now.
struct Link {
    // Fields are dropped in this order: the connection is closed before its permit is given back.
    upstream: TcpUpstream,
    permit: PoolPermit,
    pod: UpstreamIdentity,
    /// Whether it was open before its present queries.
    is_reused: bool,
    /// Whether it has brought an answer to its present queries.
    has_answered: bool,
    /// Whether it is closed after its present queries.
    is_spoiled: bool,
}

/// One connection in the holder's share. Dropping it gives the unit back.
struct PoolPermit {
    all: Arc<ServerConnections>,
    holder: Holder,
    target: Option<Target>,
    is_given_back: bool,
}

impl PoolPermit {
    fn is_for(&self, holder: Holder, target: Target) -> bool {
        self.holder == holder && self.target == Some(target)
    }

    fn give_back(mut self, upstream: TcpUpstream, until: Instant) {
        let Some(target) = self.target else {
            return;
        };
        self.is_given_back = true;
        let unanswered = upstream.unanswered();
        let mut pool = self.all.pool.lock();
        pool.give_back(self.holder, target, (upstream, unanswered), until);
    }
}

impl Drop for PoolPermit {
    fn drop(&mut self) {
        if !self.is_given_back {
            self.all.pool.lock().closed(self.holder, self.target);
            self.all.open.down();
        }
    }
}

impl Links {
    pub(super) fn new(server: SocketAddr, all: Arc<ServerConnections>) -> Self {
        Self {
            server,
            all,
            lent: None,
            own: None,
        }
    }

    /// Takes the connection that a query needs, if this client connection does not have it.
    pub(super) fn prepare(&mut self, wanted: &Wanted) -> Result<(), NoConnection> {
        match wanted.via {
            Via::Own if self.own.is_some() => {}
            Via::Own => self.own = Some(self.alone(wanted)?),
            Via::Lent => {
                let target = Target {
                    identity: wanted.identity,
                    server: self.server,
                };
                match &self.lent {
                    None => self.lent = Some(self.borrow(wanted, target)?),
                    Some(lent) if lent.permit.is_for(wanted.holder, target) => {}
                    // Queries under an earlier identity use it. It is given back after them.
                    Some(_) => return Err(NoConnection),
                }
            }
        }
        Ok(())
    }

    fn alone(&self, wanted: &Wanted) -> Result<Link, NoConnection> {
        let taken = self.all.pool.lock().take_alone(wanted.holder);
        match taken {
            Taken::New { closes } => Ok(self.open(wanted, None, closes)),
            Taken::Idle(_) | Taken::Full => Err(NoConnection),
        }
    }

    fn borrow(&self, wanted: &Wanted, target: Target) -> Result<Link, NoConnection> {
        loop {
            let taken = self.all.pool.lock().take(wanted.holder, target);
            let mut upstream = match taken {
                Taken::Idle(upstream) => upstream,
                Taken::New { closes } => return Ok(self.open(wanted, Some(target), closes)),
                Taken::Full => return Err(NoConnection),
            };
            let permit = self.permit(wanted.holder, Some(target));
            // This makes no system call if the runtime has reported nothing.
            if upstream.read_late_answers().is_ok() {
                return Ok(Link {
                    upstream,
                    permit,
                    pod: wanted.pod,
                    is_reused: true,
                    has_answered: false,
                    is_spoiled: false,
                });
            }
        }
    }

    fn open(&self, wanted: &Wanted, target: Option<Target>, closes: Option<TcpUpstream>) -> Link {
        self.all.open.up();
        if let Some(upstream) = closes {
            self.all.close(upstream);
        }
        let (fallbacks, made) = (self.all.fallbacks.clone(), self.all.made.clone());
        Link {
            upstream: TcpUpstream::new(self.server, fallbacks, made),
            permit: self.permit(wanted.holder, target),
            pod: wanted.pod,
            is_reused: false,
            has_answered: false,
            is_spoiled: false,
        }
    }

    fn permit(&self, holder: Holder, target: Option<Target>) -> PoolPermit {
        PoolPermit {
            all: Arc::clone(&self.all),
            holder,
            target,
            is_given_back: false,
        }
    }

    /// Sends a message on a connection that was prepared.
    pub(super) fn send(&mut self, via: Via, message: &[u8]) {
        if let Some(link) = self.link(via) {
            link.upstream.send(message, link.pod);
        }
    }

    /// Whether an unanswered query of an earlier client has this id.
    pub(super) fn has_late(&self, id: u16) -> bool {
        let lent = self.lent.as_ref();
        lent.is_some_and(|lent| lent.upstream.has_late(id))
    }

    /// Whether a message with this id answers an earlier client's query, which is then removed.
    pub(super) fn ends_late(&mut self, via: Via, id: u16) -> bool {
        let link = self.link(via);
        link.is_some_and(|link| link.upstream.ends_late(id))
    }

    /// Waits for an event, forever if there is no connection. Cancel-safe.
    pub(super) async fn happen(&mut self) -> (Via, UpstreamEvent) {
        async fn of(link: &mut Option<Link>) -> UpstreamEvent {
            match link {
                Some(link) => link.upstream.happen().await,
                None => std::future::pending().await,
            }
        }
        tokio::select! {
            happened = of(&mut self.lent) => (Via::Lent, happened),
            happened = of(&mut self.own) => (Via::Own, happened),
        }
    }

    /// Moves the next whole message of a connection into `into`.
    pub(super) fn take(&mut self, via: Via, into: &mut Vec<u8>) -> bool {
        let link = self.link(via);
        link.is_some_and(|link| link.upstream.reader.take(into))
    }

    /// Notes that a query was answered. `keeps`: how long the server keeps an idle connection open,
    /// if the server stated it (RFC 7828).
    pub(super) fn answered(&mut self, via: Via, keeps: Option<Duration>) {
        if let Some(link) = self.link(via) {
            link.has_answered = true;
            link.upstream.idle_limit = keeps.or(link.upstream.idle_limit);
        }
    }

    /// Notes that a query was not answered in time. Its connection serves no later queries.
    pub(super) fn unserved(&mut self, via: Via) {
        if let Some(link) = self.link(via) {
            link.is_spoiled = true;
        }
    }

    /// Notes that the connection ended. The next message opens it again, under the same permit.
    pub(super) fn lost(&mut self, via: Via) -> Loss {
        let Some(link) = self.link(via) else {
            return Loss::Unserved;
        };
        let is_usual = link.is_reused || link.has_answered;
        link.is_reused = false;
        link.has_answered = false;
        if is_usual {
            Loss::Usual
        } else {
            Loss::Unserved
        }
    }

    pub(super) fn is_lent(&self) -> bool {
        self.lent.is_some()
    }

    /// Gives the lent connection back to the pool with the ids of its unanswered queries. Closes it
    /// if it cannot serve other clients.
    pub(super) fn give_back(&mut self, unanswered: impl Iterator<Item = u16>, now: Instant) {
        let Some(link) = self.lent.take() else {
            return;
        };
        let mut upstream = link.upstream;
        upstream.abandon(unanswered);
        upstream.shrink();
        let keeps = upstream
            .idle_limit
            .unwrap_or(self.all.idle)
            .min(self.all.idle);
        let is_good = !link.is_spoiled
            && upstream.is_settled()
            && upstream.age(now) < MAX_AGE
            && upstream.memory() <= IDLE_MEMORY
            && upstream.unanswered() <= MAX_UNANSWERED
            && !keeps.is_zero();
        if is_good {
            let stays = match upstream.unanswered() {
                0 => keeps,
                _ => self.all.timeout,
            };
            link.permit.give_back(upstream, now + stays);
        }
    }

    /// Bytes of memory that the buffers use.
    pub(super) fn memory(&self) -> usize {
        let links = self.lent.iter().chain(&self.own);
        links.map(|link| link.upstream.memory()).sum()
    }

    /// Frees large buffers that are empty.
    pub(super) fn shrink(&mut self) {
        for link in self.lent.iter_mut().chain(&mut self.own) {
            link.upstream.shrink();
        }
    }

    fn link(&mut self, via: Via) -> Option<&mut Link> {
        match via {
            Via::Lent => self.lent.as_mut(),
            Via::Own => self.own.as_mut(),
        }
    }
}
