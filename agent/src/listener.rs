//! The sockets that the agent serves on: how many connections each may have, and how many it has.
//!
//! All of them together leave descriptors for the agent's own work: maps, programs, files, network
//! namespaces, and the API server.

use std::time::Duration;

use daemon::{
    guests::{ConnectionCounts, Guests},
    http_server::{Admission, Limits, Users},
    label,
    peer::Peer,
};

use crate::grpc::holder;

/// Descriptors of the agent's own work, and of processes of proxies that are followed.
const OWN: usize = 512 + holder::MAX_PROCESSES;
/// An attempt of the CNI plugin waits for no longer than 20 s, and other requests for 30 s.
const LIFE: Duration = Duration::from_secs(60);

label! {
    /// A socket that the agent serves on.
    Listener = "listener" {
        /// The gRPC socket for holdfast-sdp (--sdp-socket).
        Sdp => "sdp",
        /// The port of FQDNData, Cilium's gRPC service for DNS proxies
        /// (--enable-standalone-dns-proxy).
        Fqdndata => "fqdndata",
        /// The socket to which commands connect (--admin-socket).
        Admin => "admin",
        /// The socket for the CNI plugin (--cni-socket).
        Cni => "cni",
        /// The address for probes and Prometheus (--metrics-address).
        Metrics => "metrics",
    }
}

impl Listener {
    /// Maximum connections at once. A node has a few proxies with one connection each; the pods of a node
    /// may all start at the same time.
    fn connections(self) -> usize {
        match self {
            Self::Sdp | Self::Cni => 256,
            Self::Fqdndata => 128,
            Self::Admin | Self::Metrics => 64,
        }
    }

    /// Descriptors of one connection: a proxy's connection also has one of the process, and one more while
    /// a write waits.
    fn descriptors(self) -> usize {
        match self {
            Self::Sdp => 3,
            Self::Fqdndata | Self::Admin | Self::Cni | Self::Metrics => 1,
        }
    }
}

/// The limit and the counters of one socket's connections.
#[derive(Clone, Debug)]
struct Limited {
    listener: Listener,
    connections: usize,
    counts: ConnectionCounts,
}

/// The limits of all sockets.
#[derive(Clone, Debug)]
pub struct Listeners {
    all: Vec<Limited>,
    limit: usize,
}

impl Listeners {
    /// Limits that fit this process's limit on descriptors. If that is low, each socket has fewer
    /// connections.
    pub fn new(limit: usize) -> Self {
        let wanted = wanted();
        let fit = limit.saturating_sub(OWN).max(limit / 4).min(wanted);
        let all = Listener::ALL.iter().map(|listener| Limited {
            listener: *listener,
            connections: (listener.connections() * fit / wanted).max(2),
            counts: ConnectionCounts::default(),
        });
        let listeners = Self {
            all: all.collect(),
            limit,
        };
        if let Some(problem) = listeners.problem() {
            tracing::warn!("{problem}");
        }
        listeners
    }

    /// Why the limit on descriptors is too low, for `status`.
    pub fn problem(&self) -> Option<String> {
        let enough = reserved();
        (self.limit < enough).then(|| {
            format!(
                "the agent may open {} descriptors, and needs {enough} for its own work and its \
                 sockets: it serves fewer connections than usual; allow more (LimitNOFILE= in the \
                 unit, or ulimit -n)",
                self.limit
            )
        })
    }

    /// Maximum descriptors that the agent may have open.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Each socket with its connections: those that are open, and those that were rejected.
    pub fn counts(&self) -> Vec<(Listener, usize, u64)> {
        let all = self.all.iter();
        all.map(|of| (of.listener, of.counts.open(), of.counts.rejected()))
            .collect()
    }

    /// The connections of `listener`, for a gRPC server.
    pub(crate) fn guests(&self, listener: Listener) -> Guests<Peer> {
        let (connections, counts) = self.of(listener);
        Guests::counted(connections, counts)
    }

    /// The admission to an HTTP server. Over a Unix socket, only root and the agent's own user are served.
    pub(crate) fn admission(&self, listener: Listener) -> Admission {
        let (connections, counts) = self.of(listener);
        admission(connections, counts)
    }

    fn of(&self, listener: Listener) -> (usize, ConnectionCounts) {
        let mut all = self.all.iter();
        let found = all.find(|limited| limited.listener == listener);
        found.map_or(
            (listener.connections(), ConnectionCounts::default()),
            |limited| (limited.connections, limited.counts.clone()),
        )
    }
}

/// The admission at the CNI plugin's socket, for a process with few other sockets.
pub(crate) fn plugin_admission() -> Admission {
    admission(Listener::Cni.connections(), ConnectionCounts::default())
}

fn admission(connections: usize, counts: ConnectionCounts) -> Admission {
    Admission {
        limits: Limits {
            connections,
            life: LIFE,
            ..Limits::default()
        },
        users: Users::Own,
        counts,
    }
}

/// Descriptors that clients of the built-in proxy leave free.
pub(crate) fn reserved() -> usize {
    wanted() + OWN
}

/// Descriptors that the sockets need when each has its full number of connections.
fn wanted() -> usize {
    let each = Listener::ALL.iter();
    each.map(|listener| listener.connections() * listener.descriptors())
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(listeners: &Listeners) -> usize {
        let each = listeners.all.iter();
        each.map(|limited| limited.connections * limited.listener.descriptors())
            .sum()
    }

    #[test]
    fn connections_leave_descriptors_for_the_agents_own_work() {
        let usual = Listeners::new(1 << 20);
        assert_eq!((taken(&usual), usual.problem()), (wanted(), None));
        assert_eq!(usual.admission(Listener::Metrics).limits.connections, 64);
        for limit in [256, 512, 1024, 1500] {
            let few = Listeners::new(limit);
            let left = limit - taken(&few);
            assert!(left >= OWN.min(limit / 2), "{limit}: {left} are left");
            let problem = few.problem().unwrap();
            assert!(problem.contains("LimitNOFILE="), "{problem}");
        }
    }
}
