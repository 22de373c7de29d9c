//! Short TCP connections from several pods to one Service, each with an echo.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Result, ensure};
use parking_lot::Mutex;

use crate::lab::at;
use crate::netns::Netns;
use crate::pod::{Pod, echo};
use crate::wait::until;

/// Pause of a pod after each connection.
const PAUSE: Duration = Duration::from_millis(10);
/// Number of further connections that [`Connections::flow`] waits for.
const MORE: u64 = 20;
/// Longest wait for further connections.
const SOON: Duration = Duration::from_secs(20);
/// Maximum number of failures that are described in words.
const SAMPLES: usize = 6;

/// Numbers of tried and failed connections, with some of the errors.
#[derive(Debug, Default)]
pub(super) struct Opened {
    pub(super) tried: u64,
    /// Connections without an answer to the first SYN, or without the echo.
    pub(super) failed: u64,
    pub(super) samples: Vec<String>,
}

#[derive(Debug, Default)]
struct Common {
    stop: AtomicBool,
    tried: AtomicU64,
    failed: AtomicU64,
    samples: Mutex<Vec<String>>,
}

/// Pods that connect again and again until this is dropped.
#[derive(Debug)]
pub(super) struct Connections {
    common: Arc<Common>,
    threads: Vec<JoinHandle<()>>,
}

impl Connections {
    /// Connects to both addresses in turn.
    pub(super) fn start<'p>(
        pods: impl Iterator<Item = &'p Pod>,
        service: [IpAddr; 2],
        port: u16,
    ) -> Result<Self> {
        let mut started = Self {
            common: Arc::default(),
            threads: Vec::new(),
        };
        for pod in pods {
            let common = Arc::clone(&started.common);
            let connect = move || {
                for address in service.into_iter().cycle() {
                    if common.stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let outcome = echo(at(address, port));
                    common.tried.fetch_add(1, Ordering::Relaxed);
                    if let Err(error) = outcome {
                        common.failed.fetch_add(1, Ordering::Relaxed);
                        let mut samples = common.samples.lock();
                        if samples.len() < SAMPLES {
                            samples.push(format!("{error:#}"));
                        }
                    }
                    std::thread::sleep(PAUSE);
                }
            };
            let netns = Netns::existing(pod.netns.name());
            started.threads.push(netns.spawn(connect)?);
        }
        Ok(started)
    }

    /// Waits until [`MORE`] further connections were tried.
    pub(super) fn flow(&self) -> Result<()> {
        let tried = || Ok(self.common.tried.load(Ordering::Relaxed));
        let wanted = tried()? + MORE;
        until("further connections", SOON, tried, |now| *now >= wanted)?;
        Ok(())
    }

    /// Ends the connections. Returns their outcome.
    pub(super) fn finish(mut self) -> Result<Opened> {
        self.common.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            ensure!(thread.join().is_ok(), "a client panicked");
        }
        Ok(Opened {
            tried: self.common.tried.load(Ordering::Relaxed),
            failed: self.common.failed.load(Ordering::Relaxed),
            samples: std::mem::take(&mut *self.common.samples.lock()),
        })
    }
}

impl Drop for Connections {
    fn drop(&mut self) {
        self.common.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
