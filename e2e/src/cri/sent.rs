//! Receives the datagrams of the pods' first processes in the world.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Result, ensure};
use parking_lot::Mutex;

use crate::lab::{Lab, at, web4};
use crate::wait::eventually;

/// Port of the allowed and the forbidden datagrams. One socket receives both in the order in which
/// they were sent.
const PORT: u16 = 7998;
/// Address to which pods send although no policy of the tests allows it.
pub const FORBIDDEN: SocketAddr = at(web4(11), PORT);
/// Address to which pods send next, and which policies may allow.
pub const ALLOWED: SocketAddr = at(web4(10), PORT);
/// Text of the forbidden datagrams.
pub(super) const LEAK: &str = "forbidden";

const SOON: Duration = Duration::from_secs(30);

/// Datagrams that came from one address.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    forbidden: u64,
    allowed: u64,
}

/// Counts of the datagrams that arrived, by sender.
#[derive(Debug)]
pub struct Sent {
    counts: Arc<Mutex<BTreeMap<IpAddr, Count>>>,
    stop: Arc<AtomicBool>,
}

impl Sent {
    /// Receives in the lab's world.
    pub fn watch(lab: &Lab) -> Result<Self> {
        let socket = lab.world.enter(|| UdpSocket::bind(("0.0.0.0", PORT)))??;
        socket.set_read_timeout(Some(Duration::from_millis(50)))?;
        let sent = Self {
            counts: Arc::default(),
            stop: Arc::default(),
        };
        let (counts, stopped) = (Arc::clone(&sent.counts), Arc::clone(&sent.stop));
        std::thread::spawn(move || {
            let mut buffer = [0; 64];
            while !stopped.load(Ordering::Relaxed) {
                if let Ok((length, from)) = socket.recv_from(&mut buffer) {
                    let mut counts = counts.lock();
                    let count = counts.entry(from.ip()).or_default();
                    match buffer.get(..length) == Some(LEAK.as_bytes()) {
                        true => count.forbidden += 1,
                        false => count.allowed += 1,
                    }
                }
            }
        });
        Ok(sent)
    }

    /// Sets the counts of all senders to zero.
    pub fn clear(&self) {
        self.counts.lock().clear();
    }

    /// Waits until the pod at `from` has sent another allowed datagram. The pod sends forbidden
    /// datagrams before each allowed one; none of them may have arrived.
    pub fn expect_judged(&self, from: IpAddr) -> Result<()> {
        let before = self.count(from).allowed;
        // Two more datagrams are needed, because one may already have been on its way.
        eventually("the pod sends", SOON, || {
            let now = self.count(from).allowed;
            ensure!(now >= before + 2, "{from}: {now} allowed datagrams");
            Ok(())
        })?;
        self.expect_no_leak(from)
    }

    /// Fails if a forbidden datagram of `from` arrived.
    pub fn expect_no_leak(&self, from: IpAddr) -> Result<()> {
        let leaked = self.count(from).forbidden;
        ensure!(
            leaked == 0,
            "{leaked} forbidden datagrams of {from} got out"
        );
        Ok(())
    }

    /// Waits until a forbidden datagram of `from` arrives, which shows that the pod is open.
    pub fn expect_open(&self, from: IpAddr) -> Result<()> {
        eventually("a forbidden datagram", SOON, || {
            ensure!(self.count(from).forbidden > 0, "{from}: none");
            Ok(())
        })
    }

    /// Addresses from which anything arrived.
    pub fn senders(&self) -> Vec<IpAddr> {
        self.counts.lock().keys().copied().collect()
    }

    fn count(&self, from: IpAddr) -> Count {
        self.counts.lock().get(&from).copied().unwrap_or_default()
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
