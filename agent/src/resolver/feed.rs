//! From the core to the resolver: answers that count, the names that firewalls use, and the DNS
//! servers to ask. The core never waits here.

use std::{fmt, sync::Arc};

use tokio::sync::watch;

use super::{Observation, TrustedServers, WantedNames};

/// Takes an answer without waiting.
type Observe = Arc<dyn Fn(Observation) + Send + Sync>;

/// Values that the core writes and all other tasks follow.
#[derive(Clone, Default)]
pub struct ResolverFeed {
    names: watch::Sender<Arc<WantedNames>>,
    servers: watch::Sender<Arc<TrustedServers>>,
    observe: Option<Observe>,
}

impl fmt::Debug for ResolverFeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("ResolverFeed");
        shown
            .field("names", &self.names)
            .field("servers", &self.servers);
        shown.finish_non_exhaustive()
    }
}

impl ResolverFeed {
    /// Sends answers to `observe` too. `observe` must not wait.
    pub fn observed_by(mut self, observe: impl Fn(Observation) + Send + Sync + 'static) -> Self {
        self.observe = Some(Arc::new(observe));
        self
    }

    /// Receives the names of EgressFirewalls after each change.
    pub fn names(&self) -> watch::Receiver<Arc<WantedNames>> {
        self.names.subscribe()
    }

    /// Receives the trusted DNS servers after each change.
    pub fn servers(&self) -> watch::Receiver<Arc<TrustedServers>> {
        self.servers.subscribe()
    }

    pub(crate) fn observe(&self, observation: Observation) {
        if let Some(observe) = &self.observe {
            observe(observation);
        }
    }

    pub(crate) fn publish(&self, names: Arc<WantedNames>, servers: Arc<TrustedServers>) {
        let differs = |before: &Arc<WantedNames>| **before != *names;
        if differs(&self.names.borrow()) {
            self.names.send_replace(names);
        }
        let differs = |before: &Arc<TrustedServers>| **before != *servers;
        if differs(&self.servers.borrow()) {
            self.servers.send_replace(servers);
        }
    }
}
