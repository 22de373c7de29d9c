//! Connections to servers: the number that each pod has, and the idle connections.
//!
//! A connection is used again only for the same pod, server and identity.

use std::{collections::HashMap, net::SocketAddr, time::Instant};

use foldhash::quality::RandomState;
use limits::quota::{Holder, Quota};
use shared_maps::IdentityId;

/// Maximum number of connections of one pod to all servers that may serve several clients, in use
/// or idle. The pod's share of all connections may be smaller.
const MAX_OF_POD: usize = 512;
/// Maximum number of such connections of one pod to one server.
const MAX_TO_SERVER: usize = 128;

/// The other end of a connection, and the identity under which the pod reaches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Target {
    /// Identity of the pod, which may be in the connection's mark.
    pub(super) identity: IdentityId,
    /// Address and port of the server.
    pub(super) server: SocketAddr,
}

/// A permit for a connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Taken<C> {
    /// An open connection that was idle.
    Idle(C),
    /// The connection must be made. `closes` is an idle connection of the pod that must be closed
    /// for it, if any.
    New { closes: Option<C> },
    /// The pod has all the connections that it may have, and queries use all of them.
    Full,
}

/// All connections of all pods.
#[derive(Debug)]
pub(super) struct Pool<C> {
    quota: Quota,
    pods: HashMap<Holder, Pod<C>, RandomState>,
}

/// Connections of one pod to all servers.
#[derive(Debug)]
struct Pod<C> {
    /// Number of connections, in use or idle.
    open: usize,
    /// Number of connections that are used for one client only.
    alone: usize,
    by_target: HashMap<Target, usize, RandomState>,
    /// Idle connections in the order in which they became idle; at most [`MAX_OF_POD`].
    idle: Vec<Idle<C>>,
}

#[derive(Debug)]
struct Idle<C> {
    connection: C,
    target: Target,
    /// Number of its queries whose client is gone. The server may still answer them.
    unanswered: usize,
    until: Instant,
}

impl<C> Default for Pod<C> {
    fn default() -> Self {
        Self {
            open: 0,
            alone: 0,
            by_target: HashMap::default(),
            idle: Vec::new(),
        }
    }
}

impl<C> Pod<C> {
    fn to(&self, target: Target) -> usize {
        self.by_target.get(&target).copied().unwrap_or(0)
    }

    fn opened(&mut self, target: Option<Target>) {
        self.open += 1;
        match target {
            Some(target) => *self.by_target.entry(target).or_default() += 1,
            None => self.alone += 1,
        }
    }

    fn closed(&mut self, target: Option<Target>) {
        self.open = self.open.saturating_sub(1);
        let Some(target) = target else {
            self.alone = self.alone.saturating_sub(1);
            return;
        };
        if let Some(count) = self.by_target.get_mut(&target) {
            *count -= 1;
            if *count == 0 {
                self.by_target.remove(&target);
            }
        }
    }

    /// The connection to use for `target`: the one that became idle last, so that the other
    /// connections get old and are closed.
    fn take_idle(&mut self, target: Target) -> Option<C> {
        let is_free = |idle: &Idle<C>| idle.target == target && idle.unanswered == 0;
        let at = self.idle.iter().rposition(is_free)?;
        Some(self.idle.remove(at).connection)
    }

    /// The connection for `target` with the fewest unanswered queries.
    fn share_idle(&mut self, target: Target) -> Option<C> {
        let all = self.idle.iter().enumerate();
        let of_target = all.filter(|(_, idle)| idle.target == target);
        let (at, _) = of_target.min_by_key(|(_, idle)| idle.unanswered)?;
        Some(self.idle.remove(at).connection)
    }

    /// Removes the connection that has been idle for longest.
    fn evict(&mut self) -> Option<C> {
        if self.idle.is_empty() {
            return None;
        }
        let evicted = self.idle.remove(0);
        self.closed(Some(evicted.target));
        Some(evicted.connection)
    }
}

impl<C> Pool<C> {
    /// A pool of at most `limit` connections for all pods together. Each pod has a share of it.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            quota: Quota::new(limit),
            pods: HashMap::default(),
        }
    }

    /// Takes a connection of the pod to `target` for its queries.
    ///
    /// While the pod may have more connections, no query waits behind an unanswered query whose
    /// client is gone.
    pub(super) fn take(&mut self, holder: Holder, target: Target) -> Taken<C> {
        let may_open = self.quota.allows(holder, 1);
        let pod = self.pods.entry(holder).or_default();
        let may_open = may_open && pod.open - pod.alone < MAX_OF_POD;
        if let Some(connection) = pod.take_idle(target) {
            return Taken::Idle(connection);
        }
        let has_place = pod.to(target) < MAX_TO_SERVER;
        if !(has_place && may_open)
            && let Some(connection) = pod.share_idle(target)
        {
            return Taken::Idle(connection);
        }
        if has_place {
            self.open(holder, Some(target), may_open)
        } else {
            Taken::Full
        }
    }

    /// A permit for a connection that is never used for other queries.
    pub(super) fn take_alone(&mut self, holder: Holder) -> Taken<C> {
        let may_open = self.quota.allows(holder, 1);
        self.open(holder, None, may_open)
    }

    /// Counts a new connection. If the pod may have no more connections, the new one replaces an
    /// idle one.
    fn open(&mut self, holder: Holder, target: Option<Target>, may_open: bool) -> Taken<C> {
        let pod = self.pods.entry(holder).or_default();
        let closes = if may_open {
            self.quota.add(holder, 1);
            None
        } else {
            let Some(evicted) = pod.evict() else {
                self.forget(holder);
                return Taken::Full;
            };
            Some(evicted)
        };
        pod.opened(target);
        Taken::New { closes }
    }

    /// Returns a connection to the pool that no client's query uses. It may be used again until `until`.
    /// `unanswered` of its queries are still at the server, and their clients are gone.
    pub(super) fn give_back(
        &mut self,
        holder: Holder,
        target: Target,
        (connection, unanswered): (C, usize),
        until: Instant,
    ) {
        let pod = self.pods.entry(holder).or_default();
        pod.idle.push(Idle {
            connection,
            target,
            unanswered,
            until,
        });
    }

    /// Notes that a connection that was taken is closed. `target` is `None` for connections of
    /// [`Self::take_alone`].
    pub(super) fn closed(&mut self, holder: Holder, target: Option<Target>) {
        if let Some(pod) = self.pods.get_mut(&holder) {
            pod.closed(target);
            self.quota.give_back(holder, 1);
        }
        self.forget(holder);
    }

    fn forget(&mut self, holder: Holder) {
        if self.pods.get(&holder).is_some_and(|pod| pod.open == 0) {
            self.pods.remove(&holder);
        }
    }

    /// Removes all idle connections and returns them, so that the caller closes them.
    pub(super) fn clear(&mut self) -> Vec<C> {
        let mut all = Vec::new();
        for (holder, pod) in &mut self.pods {
            self.quota.give_back(*holder, pod.idle.len());
            for idle in std::mem::take(&mut pod.idle) {
                pod.closed(Some(idle.target));
                all.push(idle.connection);
            }
        }
        self.pods.retain(|_, pod| pod.open > 0);
        all
    }

    /// Removes the idle connections whose time is over, and the connections for which `look`
    /// returns `None`. Otherwise, `look` returns the number of unanswered queries.
    pub(super) fn expire(
        &mut self,
        now: Instant,
        mut look: impl FnMut(&mut C) -> Option<usize>,
    ) -> Vec<C> {
        let mut over = Vec::new();
        for (holder, pod) in &mut self.pods {
            let removed = pod.idle.extract_if(.., |idle| {
                if now >= idle.until {
                    return true;
                }
                match look(&mut idle.connection) {
                    Some(unanswered) => idle.unanswered = unanswered,
                    None => return true,
                }
                false
            });
            let removed: Vec<_> = removed.collect();
            self.quota.give_back(*holder, removed.len());
            for idle in removed {
                pod.closed(Some(idle.target));
                over.push(idle.connection);
            }
        }
        self.pods.retain(|_, pod| pod.open > 0);
        over
    }
}

#[cfg(test)]
mod tests;
