//! Sockets that the agent serves on. All are bound before anything starts.

use anyhow::{Context as _, Result};
use daemon::http_server;
use tokio::net::{TcpListener, UnixListener};

use crate::{config::Config, grpc::peer};

/// Every socket that the agent listens on.
pub(super) struct Listeners {
    /// Socket of the native gRPC service (`--sdp-socket`).
    pub(super) sdp: UnixListener,
    /// TCP port of FQDNData, for Cilium's standalone proxies; `None` = off.
    pub(super) fqdndata: Option<TcpListener>,
    pub(super) pages: PageListeners,
}

/// Listeners for people, the CNI plugin and Prometheus.
pub(super) struct PageListeners {
    pub(super) admin: UnixListener,
    pub(super) cni: Option<UnixListener>,
    pub(super) metrics: Option<TcpListener>,
}

impl Listeners {
    /// Binds every socket. The error names the flag of the socket that failed.
    pub(super) async fn bind(config: &Config) -> Result<Self> {
        let sdp = peer::bind(&config.flags.sdp_socket, Some(config.flags.sdp_group))
            .context("--sdp-socket")?;
        let admin = peer::bind(&config.flags.admin_socket, None).context("--admin-socket")?;
        let cni = peer::bind_some(config.flags.cni.plugin.socket()).context("--cni-socket")?;
        let metrics = http_server::bind_metrics(&config.metrics_address).await?;
        let fqdndata = match config.fqdndata_port() {
            Some(port) => Some(TcpListener::bind(("127.0.0.1", port)).await.with_context(|| {
                format!("--standalone-dns-proxy-server-port {port}: choose another, or stop what has it")
            })?),
            None => None,
        };
        let pages = PageListeners {
            admin,
            cni,
            metrics,
        };
        Ok(Self {
            sdp,
            fqdndata,
            pages,
        })
    }
}
