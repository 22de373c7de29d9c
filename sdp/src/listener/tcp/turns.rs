//! Endpoints take turns, so that an endpoint with many busy connections does not delay the
//! connections of another endpoint.
//!
//! The runtime runs tasks in the order in which they became ready. Without turns, a connection of
//! one endpoint waits for every busy connection of another endpoint, several times for each query.
//! Here a connection works only while it has one of its endpoint's few permits. The endpoint's
//! other connections wait for a permit in the order of arrival, and use no CPU time.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use foldhash::quality::RandomState;
use limits::quota::Holder;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

/// Connections of one endpoint that work at once: one for each thread of the runtime, so that a
/// single endpoint can use all threads.
const PERMITS: usize = 2;
/// Number of entries at which the entries of endpoints without connections are removed. The number
/// is then set to twice the remaining entries, if that is more.
const FORGET_FROM: usize = 64;

/// Permits for work, by endpoint, which all its connections share.
#[derive(Debug, Default)]
pub(super) struct Turns {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    by_holder: HashMap<Holder, Weak<Semaphore>, RandomState>,
    forget_at: usize,
}

impl Turns {
    /// The permits that all connections of `holder` share.
    pub(super) fn of(&self, holder: Holder) -> Arc<Semaphore> {
        let mut state = self.state.lock();
        if let Some(turn) = state.by_holder.get(&holder).and_then(Weak::upgrade) {
            return turn;
        }
        if state.by_holder.len() >= state.forget_at.max(FORGET_FROM) {
            state.by_holder.retain(|_, turn| turn.strong_count() > 0);
            state.forget_at = 2 * state.by_holder.len();
        }
        let turn = Arc::new(Semaphore::new(PERMITS));
        state.by_holder.insert(holder, Arc::downgrade(&turn));
        turn
    }
}

#[cfg(test)]
mod tests {
    use shared_maps::EndpointId;

    use super::*;

    fn endpoint(id: u16) -> Holder {
        Holder::Endpoint {
            id: EndpointId(id),
            ifindex: 1,
        }
    }

    #[test]
    fn connections_of_an_endpoint_share_permits_and_endpoints_do_not() {
        let turns = Turns::default();
        let (one, same, other) = (
            turns.of(endpoint(1)),
            turns.of(endpoint(1)),
            turns.of(endpoint(2)),
        );
        let _taken: Vec<_> = (0..PERMITS).map(|_| one.try_acquire().unwrap()).collect();
        assert!(same.try_acquire().is_err());
        assert!(other.try_acquire().is_ok());
    }

    #[test]
    fn endpoints_without_connections_are_forgotten() {
        let turns = Turns::default();
        let lasting = turns.of(endpoint(0));
        for id in 1..5_000 {
            drop(turns.of(endpoint(id)));
        }
        assert!(turns.state.lock().by_holder.len() <= FORGET_FROM);
        assert!(Arc::ptr_eq(&lasting, &turns.of(endpoint(0))));
    }
}
