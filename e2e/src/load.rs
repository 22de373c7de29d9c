//! Sends the same query from a pod without pause. Each query has a new source port. A query without an answer is not
//! sent again, but counts as a failure.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Result, ensure};
use parking_lot::Mutex;

use crate::dns::probe::Query;
use crate::pod::Pod;
use crate::wait::until;

/// Running load; stopped when dropped.
#[derive(Debug)]
pub struct Load {
    stop: Arc<AtomicBool>,
    right: Arc<AtomicU64>,
    failures: Arc<Mutex<Vec<String>>>,
    threads: Vec<JoinHandle<()>>,
}

impl Load {
    /// Starts `threads` threads that send `query`, whose answer must be `address`.
    pub fn start(pod: &Pod, query: &Query, address: IpAddr, threads: u32) -> Result<Self> {
        let mut load = Self {
            stop: Arc::default(),
            right: Arc::default(),
            failures: Arc::default(),
            threads: Vec::new(),
        };
        for _ in 0..threads {
            let query = query.clone();
            let (stop, right, failures) =
                (load.stop.clone(), load.right.clone(), load.failures.clone());
            load.threads.push(pod.netns.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    match query.send().and_then(|reply| reply.expect(address)) {
                        Ok(_) => {
                            right.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(error) => failures.lock().push(format!("{error:#}")),
                    }
                }
            })?);
        }
        Ok(load)
    }

    /// Number of right answers so far.
    pub fn right(&self) -> u64 {
        self.right.load(Ordering::Relaxed)
    }

    /// Waits for `more` further right answers.
    pub fn flows(&self, more: u64) -> Result<()> {
        let wanted = self.right() + more;
        until(
            &format!("{wanted} right answers"),
            Duration::from_secs(20),
            || Ok(self.right()),
            |right| *right >= wanted,
        )?;
        Ok(())
    }

    /// Stops the load and returns the number of right answers. Fails if any query was lost or
    /// answered wrongly.
    pub fn finish(mut self) -> Result<u64> {
        self.halt();
        let failures = self.failures.lock();
        ensure!(
            failures.is_empty(),
            "{} of {} queries failed, first: {}",
            failures.len(),
            failures.len() as u64 + self.right(),
            failures.first().map_or("", String::as_str)
        );
        Ok(self.right())
    }

    fn halt(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.halt();
    }
}
