//! Sockets with clients' own ports, one for each flow (client's address and port, and server).
//!
//! A client usually uses a new port for each lookup, so such a socket serves few queries and is
//! soon closed. If another process or worker has the port for the same flow, the query is sent from
//! the node's address, because the kernel would deliver the answers for both sockets to one of
//! them.

use std::{
    collections::{HashMap, VecDeque},
    net::SocketAddr,
    time::{Duration, Instant},
};

use foldhash::quality::RandomState;
use limits::quota::{Holder, Quota};
use nix::sys::epoll::Epoll;

use super::{
    RegisterError, UdpUpstream,
    sockets::{MAX_TRANSPARENT, ServerKey, UpSocket},
};
use crate::{
    arena::{Arena, Key},
    socket::{self, FlowPort},
};

/// Time without queries after which a socket without waiting queries is closed.
const MAX_IDLE: Duration = Duration::from_secs(1);
/// Maximum number of outdated entries in the list of idle sockets.
const OUTDATED: usize = 1024;

/// Client's address and port, and server.
type Flow = (SocketAddr, SocketAddr);

/// The sockets of flows of one worker.
#[derive(Debug)]
pub(super) struct Flows {
    sockets: HashMap<Flow, Key, RandomState>,
    /// Number of flows of each address and port.
    ports: HashMap<SocketAddr, usize, RandomState>,
    /// Sockets that wait for answers, counted for the endpoint that opened them. So silent servers
    /// stop only the endpoint that sends queries to them.
    waiting: Quota,
    /// Sockets in the order in which they became idle. An entry is outdated if its socket was used
    /// or closed since.
    idle: VecDeque<(u64, Key)>,
    next: u64,
}

impl Default for Flows {
    fn default() -> Self {
        Self {
            sockets: HashMap::default(),
            ports: HashMap::default(),
            waiting: Quota::new(MAX_TRANSPARENT),
            idle: VecDeque::new(),
            next: 0,
        }
    }
}

impl Flows {
    /// Records that a query is sent on `socket`.
    pub(super) fn began(&mut self, socket: &mut UpSocket) {
        if socket.server.is_flow() && socket.waiting.is_empty() {
            socket.idle = None;
            self.waiting.add(socket.opener, 1);
        }
    }

    /// Records that a query on `socket` ended.
    pub(super) fn ended(&mut self, key: Key, socket: &mut UpSocket) {
        if socket.server.is_flow() && socket.waiting.is_empty() {
            self.waiting.give_back(socket.opener, 1);
            self.becomes_idle(key, socket);
        }
    }

    fn becomes_idle(&mut self, key: Key, socket: &mut UpSocket) {
        self.next += 1;
        socket.idle = Some(self.next);
        self.idle.push_back((self.next, key));
    }

    fn opened(&mut self, flow: Flow, key: Key) {
        self.sockets.insert(flow, key);
        *self.ports.entry(flow.0).or_default() += 1;
    }

    /// Removes the data about a socket that was closed.
    pub(super) fn closed(&mut self, socket: &UpSocket) {
        let Some(flow) = flow_of(&socket.server) else {
            return;
        };
        if !socket.waiting.is_empty() {
            self.waiting.give_back(socket.opener, 1);
        }
        self.sockets.remove(&flow);
        if let Some(flows) = self.ports.get_mut(&flow.0) {
            *flows -= 1;
            if *flows == 0 {
                self.ports.remove(&flow.0);
            }
        }
    }

    /// The socket that has been idle for longest.
    fn oldest(&mut self, sockets: &Arena<UpSocket>) -> Option<Key> {
        while let Some((number, key)) = self.idle.front() {
            if is_idle(sockets, *number, *key) {
                return Some(*key);
            }
            self.idle.pop_front();
        }
        None
    }
}

fn is_idle(sockets: &Arena<UpSocket>, number: u64, key: Key) -> bool {
    let socket = sockets.get(key);
    socket.is_some_and(|socket| socket.idle == Some(number))
}

fn flow_of(server: &ServerKey) -> Option<Flow> {
    let source = server.source.filter(|_| server.is_flow())?;
    Some((source, server.server))
}

impl UdpUpstream {
    /// The socket of a flow. Opens one if the flow has none.
    pub(super) fn socket_of_flow(
        &mut self,
        wanted: ServerKey,
        opener: Holder,
        now: Instant,
        epoll: &Epoll,
    ) -> Result<Key, RegisterError> {
        let flow = flow_of(&wanted).ok_or(RegisterError::Full)?;
        if let Some(key) = self.flows.sockets.get(&flow).copied() {
            let socket = self.sockets.get(key);
            let same = socket.is_some_and(|s| s.server == wanted && s.opener == opener);
            let is_waiting = socket.is_some_and(|s| !s.waiting.is_empty());
            match (same, is_waiting) {
                (true, true) => return Ok(key),
                (true, false) if self.flows.waiting.allows(opener, 1) => return Ok(key),
                // The client's identity changed, and answers for the old identity are still
                // expected.
                (false, true) => return Err(RegisterError::Full),
                (true, false) => return Err(RegisterError::Full),
                (false, false) => self.close(key),
            }
        }
        if !self.flows.waiting.allows(opener, 1) {
            return Err(RegisterError::Full);
        }
        if self.flows.sockets.len() >= MAX_TRANSPARENT
            && let Some(oldest) = self.flows.oldest(&self.sockets)
        {
            self.close(oldest);
        }
        let port = match self.flows.ports.contains_key(&flow.0) {
            true => FlowPort::Shared,
            false => FlowPort::New,
        };
        let fd = socket::udp_flow(wanted.server, wanted.identity, flow.0, port)?;
        let key = self.watch(fd, (wanted, opener), now, epoll)?;
        self.flows.opened(flow, key);
        // The socket counts as idle until its first query.
        if let Some(socket) = self.sockets.get_mut(key) {
            self.flows.becomes_idle(key, socket);
        }
        Ok(key)
    }

    /// Closes sockets of flows that have had no waiting query for a while.
    pub(crate) fn close_idle_flows(&mut self, now: Instant) {
        while let Some(oldest) = self.flows.oldest(&self.sockets) {
            let socket = self.sockets.get(oldest);
            if socket.is_some_and(|s| now.duration_since(s.used) < MAX_IDLE) {
                break;
            }
            self.close(oldest);
        }
        if self.flows.idle.len() > self.flows.sockets.len() + OUTDATED {
            let sockets = &self.sockets;
            let is_current = |(number, key): &(u64, Key)| is_idle(sockets, *number, *key);
            self.flows.idle.retain(is_current);
        }
    }
}
