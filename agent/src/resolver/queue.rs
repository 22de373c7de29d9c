//! Answers on their way from the core to the resolver's task.

use std::{collections::VecDeque, sync::Arc};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::Observation;

/// Maximum number of answers that wait. The oldest is dropped for a new one.
pub(crate) const CAPACITY: usize = 10_000;

/// A queue whose writer never waits. Clones are the same queue.
#[derive(Clone, Debug, Default)]
pub struct Observations {
    waiting: Arc<Mutex<Waiting>>,
    changed: Arc<Notify>,
}

#[derive(Debug, Default)]
struct Waiting {
    answers: VecDeque<Observation>,
    dropped: u64,
}

impl Observations {
    /// Adds an answer; drops the oldest if there are 10,000.
    pub fn push(&self, observation: Observation) {
        let mut waiting = self.waiting.lock();
        if waiting.answers.len() >= CAPACITY {
            waiting.answers.pop_front();
            waiting.dropped += 1;
        }
        waiting.answers.push_back(observation);
        drop(waiting);
        self.changed.notify_one();
    }

    /// Waits for answers, and takes all of them.
    pub async fn take(&self) -> VecDeque<Observation> {
        loop {
            let taken = self.take_now();
            if !taken.is_empty() {
                return taken;
            }
            self.changed.notified().await;
        }
    }

    /// Takes the answers that wait.
    pub fn take_now(&self) -> VecDeque<Observation> {
        std::mem::take(&mut self.waiting.lock().answers)
    }

    /// Number of answers that wait.
    pub fn len(&self) -> usize {
        self.waiting.lock().answers.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Answers that were dropped because the queue was full.
    pub fn dropped(&self) -> u64 {
        self.waiting.lock().dropped
    }
}
