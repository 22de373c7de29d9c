//! The agent's results for the held answers of one connection.

use std::{
    collections::{HashSet, VecDeque},
    sync::Arc,
};

use dns_policy::mapping::Realised;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::mapping::OnRealised;

/// Receives the results. A result is kept only while its answer is held, and dropped if it comes
/// later. There is room for the results of all held answers at once.
#[derive(Debug, Default)]
pub(super) struct Results {
    mailbox: Arc<Mailbox>,
    next: u64,
}

#[derive(Debug, Default)]
struct Mailbox {
    state: Mutex<State>,
    wake: Notify,
}

#[derive(Debug, Default)]
struct State {
    awaited: HashSet<u64>,
    come: VecDeque<(u64, Realised)>,
}

/// A pending result. Dropping it ends the wait.
#[derive(Debug)]
pub(super) struct PendingResult {
    key: u64,
    mailbox: Arc<Mailbox>,
}

impl PendingResult {
    /// The key that [`Results::next`] returns with the result.
    pub(super) fn key(&self) -> u64 {
        self.key
    }
}

impl Drop for PendingResult {
    fn drop(&mut self) {
        let mut state = self.mailbox.state.lock();
        if !state.awaited.remove(&self.key) {
            state.come.retain(|(key, _)| *key != self.key);
        }
    }
}

impl Results {
    /// Awaits one more result, which the callback delivers.
    pub(super) fn expect(&mut self) -> (PendingResult, OnRealised) {
        let key = self.next;
        self.next += 1;
        self.mailbox.state.lock().awaited.insert(key);
        let awaited = PendingResult {
            key,
            mailbox: Arc::clone(&self.mailbox),
        };
        let mailbox = Arc::clone(&self.mailbox);
        let callback = Box::new(move |realised| {
            let mut state = mailbox.state.lock();
            if state.awaited.remove(&key) {
                state.come.push_back((key, realised));
                drop(state);
                mailbox.wake.notify_one();
            }
        });
        (awaited, callback)
    }

    /// Waits for the next result. Cancel-safe. Only one task may call this.
    pub(super) async fn next(&self) -> (u64, Realised) {
        loop {
            let come = self.mailbox.state.lock().come.pop_front();
            match come {
                Some(result) => return result,
                None => self.mailbox.wake.notified().await,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn results_that_come_too_late_take_no_place_from_others() {
        let mut results = Results::default();
        let late: Vec<_> = (0..64).map(|_| results.expect()).collect();
        let (late, callbacks): (Vec<_>, Vec<_>) = late.into_iter().unzip();
        drop(late);
        let (held, others): (Vec<_>, Vec<_>) = (0..64).map(|_| results.expect()).unzip();
        // The connection's task does not run during this loop.
        for callback in callbacks.into_iter().chain(others) {
            callback(Realised::Yes);
        }
        assert_eq!(results.mailbox.state.lock().come.len(), 64);
        for awaited in &held {
            assert_eq!(results.next().await.0, awaited.key());
        }
    }

    #[test]
    fn a_result_for_a_removed_answer_is_dropped() {
        let mut results = Results::default();
        let (awaited, callback) = results.expect();
        callback(Realised::Yes);
        drop(awaited);
        let state = results.mailbox.state.lock();
        assert!(state.come.is_empty() && state.awaited.is_empty());
    }
}
