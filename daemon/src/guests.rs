//! The open connections of a socket, and which of them to close for a new one.
//!
//! There is always room for one more peer: to make room, a connection of the peer with the most
//! connections is closed. A closed connection keeps its descriptor until its task has run, so
//! [`Guests::accept`] waits for that.

use std::{
    collections::BTreeMap,
    hash::Hash,
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use limits::quota::Quota;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

/// Pause after a failed accept: the process has no descriptor, or the kernel has no memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// All connections of one socket. All clones share one state.
#[derive(Clone, Debug)]
pub struct Guests<P> {
    state: Arc<Mutex<State<P>>>,
    /// One permit for each connection that may exist, including displaced connections that are not
    /// closed yet.
    existing: Arc<Semaphore>,
    counts: ConnectionCounts,
}

#[derive(Debug)]
struct State<P> {
    quota: Quota<P>,
    /// The connections by a number that grows with each new one: the first entry is the oldest.
    open: BTreeMap<u64, Open<P>>,
    next: u64,
}

#[derive(Debug)]
struct Open<P> {
    peer: P,
    close: CancellationToken,
    activity: Activity,
}

/// One connection. Dropping it releases its place.
#[derive(Debug)]
pub struct Guest<P: Copy + Eq + Hash + Ord> {
    guests: Guests<P>,
    key: u64,
    close: CancellationToken,
    activity: Activity,
    /// `None` if the acceptor did not wait for room.
    _existing: Option<OwnedSemaphorePermit>,
}

/// How many connections a socket has, and how many it has rejected, for metrics. All clones share
/// one state.
#[derive(Clone, Debug, Default)]
pub struct ConnectionCounts(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    open: AtomicUsize,
    rejected: AtomicU64,
}

impl ConnectionCounts {
    /// Connections that are open now.
    pub fn open(&self) -> usize {
        self.0.open.load(Ordering::Relaxed)
    }

    /// Connections that were refused, or had to give way to another one.
    pub fn rejected(&self) -> u64 {
        self.0.rejected.load(Ordering::Relaxed)
    }

    fn reject(&self) {
        self.0.rejected.fetch_add(1, Ordering::Relaxed);
    }
}

/// Whether a connection has requests. All clones share one state.
#[derive(Clone, Debug, Default)]
pub struct Activity(Arc<Requests>);

#[derive(Debug, Default)]
struct Requests {
    now: AtomicUsize,
    had_one: AtomicBool,
}

impl Activity {
    /// Marks the connection as busy.
    pub fn busy(&self) -> Busy {
        self.0.had_one.store(true, Ordering::Release);
        self.0.now.fetch_add(1, Ordering::AcqRel);
        Busy(self.clone())
    }

    /// Whether a request is being answered.
    pub fn is_busy(&self) -> bool {
        self.0.now.load(Ordering::Acquire) > 0
    }

    /// Whether there was a request since the last call, or there is one now.
    pub fn take_used(&self) -> bool {
        self.0.had_one.swap(false, Ordering::AcqRel) || self.is_busy()
    }
}

/// A request is being answered until this is dropped.
#[derive(Debug)]
pub struct Busy(Activity);

impl<P: Copy + Eq + Hash + Ord> Guests<P> {
    /// Admits at most `limit` connections, and at least one.
    pub fn new(limit: usize) -> Self {
        Self::counted(limit, ConnectionCounts::default())
    }

    /// Like [`Self::new`], with connections counted for metrics.
    pub fn counted(limit: usize, counts: ConnectionCounts) -> Self {
        let limit = limit.max(1);
        let state = State {
            quota: Quota::new(limit),
            open: BTreeMap::new(),
            next: 0,
        };
        Self {
            state: Arc::new(Mutex::new(state)),
            existing: Arc::new(Semaphore::new(2 * limit)),
            counts,
        }
    }

    /// Waits until there are fewer connections than twice the limit. There are more than the limit
    /// while displaced connections are not closed yet.
    async fn room(&self) {
        // Nothing closes the semaphore.
        drop(self.existing.acquire().await);
    }

    /// Waits for room and for the next connection. Reports each failure to `failed`, and tries
    /// again after a pause.
    pub async fn accept<T, F>(&self, accept: impl Fn() -> F, failed: impl Fn(io::Error)) -> T
    where
        F: Future<Output = io::Result<T>>,
    {
        loop {
            self.room().await;
            match accept().await {
                Ok(accepted) => return accepted,
                Err(error) => failed(error),
            }
            tokio::time::sleep(ACCEPT_PAUSE).await;
        }
    }

    /// Counts one more connection that was rejected.
    pub fn reject(&self) {
        self.counts.reject();
    }

    /// Admits a connection. At the limit, another connection is closed: the oldest idle one of the
    /// peers with most connections, or their oldest if none is idle.
    pub fn admit(&self, peer: P) -> Guest<P> {
        let mut state = self.state.lock();
        while state.quota.used() >= state.quota.limit() {
            let Some(key) = state.to_close() else {
                break;
            };
            if state.remove(key) {
                self.counts.0.open.fetch_sub(1, Ordering::Relaxed);
                self.counts.reject();
            }
        }
        let key = state.next;
        state.next += 1;
        let guest = Guest {
            guests: self.clone(),
            key,
            close: CancellationToken::new(),
            activity: Activity::default(),
            _existing: Arc::clone(&self.existing).try_acquire_owned().ok(),
        };
        let open = Open {
            peer,
            close: guest.close.clone(),
            activity: guest.activity.clone(),
        };
        state.quota.add(peer, 1);
        state.open.insert(key, open);
        self.counts.0.open.fetch_add(1, Ordering::Relaxed);
        guest
    }
}

impl<P: Copy + Eq + Hash + Ord> State<P> {
    fn to_close(&self) -> Option<u64> {
        let (_, most) = self.quota.largest()?;
        let is_largest = |open: &Open<P>| self.quota.held_by(open.peer) == most;
        let of_largest = || self.open.iter().filter(|(_, open)| is_largest(open));
        let idle = of_largest().find(|(_, open)| !open.activity.is_busy());
        idle.or_else(|| of_largest().next()).map(|(key, _)| *key)
    }

    /// Removes a connection. Returns false if it was already removed.
    fn remove(&mut self, key: u64) -> bool {
        let removed = self.open.remove(&key);
        if let Some(open) = &removed {
            self.quota.give_back(open.peer, 1);
            open.close.cancel();
        }
        removed.is_some()
    }
}

impl<P: Copy + Eq + Hash + Ord> Guest<P> {
    /// Cancelled when the connection must be closed for another one.
    pub fn close(&self) -> CancellationToken {
        self.close.clone()
    }

    /// Marks the connection as busy.
    pub fn busy(&self) -> Busy {
        self.activity.busy()
    }

    /// State of the connection's requests, which is shared with this guest.
    pub fn activity(&self) -> Activity {
        self.activity.clone()
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.0.now.fetch_sub(1, Ordering::AcqRel);
    }
}

impl<P: Copy + Eq + Hash + Ord> Drop for Guest<P> {
    fn drop(&mut self) {
        if self.guests.state.lock().remove(self.key) {
            self.guests.counts.0.open.fetch_sub(1, Ordering::Relaxed);
        }
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
    fn connections_are_counted_until_they_end_or_give_way() {
        let counts = ConnectionCounts::default();
        let guests = Guests::counted(2, counts.clone());
        let open: Vec<_> = (0..5).map(|_| guests.admit(1)).collect();
        assert_eq!((counts.open(), counts.rejected()), (2, 3));
        drop(open);
        assert_eq!((counts.open(), counts.rejected()), (0, 3));
    }

    #[test]
    fn a_connection_is_busy_until_its_last_request_is_answered() {
        let guest = Guests::new(1).admit(1);
        let activity = guest.activity();
        assert!(!activity.take_used());
        let requests = [guest.busy(), activity.busy()];
        assert!(activity.is_busy() && activity.take_used() && activity.take_used());
        let [first, second] = requests;
        drop(first);
        assert!(activity.is_busy());
        drop(second);
        assert!(!activity.is_busy() && !activity.take_used());
    }

    #[tokio::test]
    async fn there_is_no_room_until_those_that_gave_way_are_closed() {
        let guests = Guests::new(2);
        let mut open: Vec<_> = (0..3).map(|_| guests.admit(1)).collect();
        guests.room().await;
        open.push(guests.admit(1));
        let room = guests.room();
        tokio::pin!(room);
        let at_once = std::time::Duration::ZERO;
        assert!(tokio::time::timeout(at_once, &mut room).await.is_err());
        open.pop();
        room.await;
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
