//! The open connections of a socket, and the one to close for another.
//!
//! There is always room for one more peer: a connection of the peer with most of them is closed for it.

use std::{
    collections::BTreeMap,
    hash::Hash,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::quota::Quota;

/// All connections of one socket. Clones are one.
#[derive(Debug)]
pub struct Guests<P> {
    state: Arc<Mutex<State<P>>>,
}

#[derive(Debug)]
struct State<P> {
    quota: Quota<P>,
    /// By age: keys rise.
    open: BTreeMap<u64, Open<P>>,
    next: u64,
}

#[derive(Debug)]
struct Open<P> {
    peer: P,
    close: CancellationToken,
    busy: Arc<AtomicBool>,
}

/// One connection. Dropping it releases its place.
#[derive(Debug)]
pub struct Guest<P: Copy + Eq + Hash + Ord> {
    guests: Guests<P>,
    key: u64,
    close: CancellationToken,
    busy: Arc<AtomicBool>,
}

/// A request is being answered until this is dropped.
#[derive(Debug)]
pub struct Busy<'a>(&'a AtomicBool);

impl<P> Clone for Guests<P> {
    fn clone(&self) -> Self {
        Self {
            state: Arc::clone(&self.state),
        }
    }
}

impl<P: Copy + Eq + Hash + Ord> Guests<P> {
    /// At most `limit` connections, and at least one.
    pub fn new(limit: usize) -> Self {
        let state = State {
            quota: Quota::new(limit.max(1)),
            open: BTreeMap::new(),
            next: 0,
        };
        Self {
            state: Arc::new(Mutex::new(state)),
        }
    }

    /// Admits a connection. If there are as many as may be, another one is closed: the oldest
    /// idle one of the peers with most connections, or their oldest if none is idle.
    pub fn admit(&self, peer: P) -> Guest<P> {
        let mut state = self.state.lock();
        while state.quota.used() >= state.quota.limit() {
            let Some(key) = state.to_close() else {
                break;
            };
            state.remove(key);
        }
        let key = state.next;
        state.next += 1;
        let guest = Guest {
            guests: self.clone(),
            key,
            close: CancellationToken::new(),
            busy: Arc::default(),
        };
        let open = Open {
            peer,
            close: guest.close.clone(),
            busy: Arc::clone(&guest.busy),
        };
        state.quota.add(peer, 1);
        state.open.insert(key, open);
        guest
    }
}

impl<P: Copy + Eq + Hash + Ord> State<P> {
    fn to_close(&self) -> Option<u64> {
        let (_, most) = self.quota.largest()?;
        let is_largest = |open: &Open<P>| self.quota.held_by(open.peer) == most;
        let of_largest = || self.open.iter().filter(|(_, open)| is_largest(open));
        let idle = of_largest().find(|(_, open)| !open.busy.load(Ordering::Acquire));
        idle.or_else(|| of_largest().next()).map(|(key, _)| *key)
    }

    fn remove(&mut self, key: u64) {
        if let Some(open) = self.open.remove(&key) {
            self.quota.give_back(open.peer, 1);
            open.close.cancel();
        }
    }
}

impl<P: Copy + Eq + Hash + Ord> Guest<P> {
    /// Cancelled when the connection has to give way.
    pub fn close(&self) -> CancellationToken {
        self.close.clone()
    }

    /// Marks the connection as busy.
    pub fn busy(&self) -> Busy<'_> {
        self.busy.store(true, Ordering::Release);
        Busy(&self.busy)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl<P: Copy + Eq + Hash + Ord> Drop for Guest<P> {
    fn drop(&mut self) {
        self.guests.state.lock().remove(self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peer_with_most_connections_gives_way_and_idle_ones_first() {
        let guests = Guests::new(4);
        let few = guests.admit("few");
        let many: Vec<_> = (0..3).map(|_| guests.admit("many")).collect();
        let busy = many[0].busy();
        let another = guests.admit("new");
        let closed = |guest: &Guest<_>| guest.close().is_cancelled();
        assert!(!closed(&few) && !closed(&another));
        assert_eq!(
            many.iter().map(closed).collect::<Vec<_>>(),
            [false, true, false]
        );
        drop(busy);
        let fifth = guests.admit("new");
        assert!(closed(&many[0]) || closed(&another) || closed(&many[2]));
        drop((few, many, another, fifth));
        assert_eq!(guests.state.lock().quota.used(), 0);
        assert!(guests.state.lock().open.is_empty());
    }

    #[test]
    fn among_peers_with_as_many_connections_the_oldest_idle_one_gives_way() {
        for peers in [[1, 2, 3], [3, 2, 1], [2, 3, 1]] {
            let guests = Guests::new(3);
            let open = peers.map(|peer| guests.admit(peer));
            let busy = open[0].busy();
            let _fourth = guests.admit(9);
            let closed = open.each_ref().map(|guest| guest.close().is_cancelled());
            assert_eq!(closed, [false, true, false], "{peers:?}");
            drop(busy);
            let _fifth = guests.admit(8);
            assert!(open[0].close().is_cancelled(), "{peers:?}");
        }
    }

    #[test]
    fn one_that_is_busy_gives_way_where_all_are() {
        let guests = Guests::new(1);
        let first = guests.admit(1);
        let _busy = first.busy();
        let second = guests.admit(2);
        assert!(first.close().is_cancelled() && !second.close().is_cancelled());
    }
}
