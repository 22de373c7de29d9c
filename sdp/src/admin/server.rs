//! The sockets of the admin thread.

use std::{
    fs, io,
    net::SocketAddr,
    os::unix::fs::FileTypeExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use daemon::{
    http_server::{self, Admission, Socket},
    unix_socket,
};
use socket2::{Domain, Type};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{AdminError, AdminState, SocketKind};
use crate::config::Config;

/// Maximum number of connections that wait to be accepted.
const BACKLOG: i32 = 1024;

/// The socket of the metrics address, if there is one.
///
/// It is bound as the user that starts the proxy: the kernel lets replicas share a port only if one
/// user bound all of their sockets, and earlier builds bound theirs as root.
#[derive(Debug)]
pub struct MetricsListener(Option<std::net::TcpListener>);

impl MetricsListener {
    /// Binds the first usable address of `--metrics-address`; no socket if metrics are off.
    pub fn open(config: &Config) -> Result<Self, AdminError> {
        bind_metrics(config).map(Self)
    }
}

/// The bound admin socket and, unless metrics are off, the bound metrics socket.
#[derive(Debug)]
pub struct AdminListeners {
    admin: std::os::unix::net::UnixListener,
    path: PathBuf,
    metrics: Option<std::net::TcpListener>,
}

impl AdminListeners {
    /// Binds the admin socket, as the user that the proxy runs as: its directory belongs to that
    /// user, and a root without CAP_DAC_OVERRIDE may not write there.
    pub fn open(config: &Config, metrics: MetricsListener) -> Result<Self, AdminError> {
        let path = config.admin_socket.clone();
        Ok(Self {
            admin: bind_unix(&path)?,
            path,
            metrics: metrics.0,
        })
    }

    /// Serves both sockets until `stop` is cancelled, and then removes the admin socket.
    pub(super) async fn serve(self, state: Arc<AdminState>, stop: CancellationToken) {
        let tasks = TaskTracker::new();
        let counts = state.shared.connections.clone();
        let serve = |socket, kind| {
            let state = Arc::clone(&state);
            let service = move |request| {
                let state = Arc::clone(&state);
                async move { state.answer(kind, request).await }
            };
            let counts = match kind {
                SocketKind::Admin => counts.admin.clone(),
                SocketKind::Metrics => counts.metrics.clone(),
            };
            let admission = Admission {
                counts,
                ..Admission::default()
            };
            http_server::serve(socket, admission, service, tasks.clone(), stop.clone())
        };
        let admin = tokio::net::UnixListener::from_std(self.admin).map(Socket::Unix);
        let metrics = self.metrics.map(tokio::net::TcpListener::from_std);
        match (admin, metrics.transpose()) {
            (Ok(admin), Ok(None)) => serve(admin, SocketKind::Admin).await,
            (Ok(admin), Ok(Some(metrics))) => {
                let metrics = serve(Socket::Tcp(metrics), SocketKind::Metrics);
                tokio::join!(serve(admin, SocketKind::Admin), metrics);
            }
            (Err(error), _) | (_, Err(error)) => {
                tracing::error!(
                    %error,
                    "the server of the admin socket and the metrics address failed; restart the proxy"
                );
                stop.cancelled().await;
            }
        }
        remove(&self.path);
    }
}

/// Removes the socket at `path` if a process that was killed left it there. Returns whether it
/// removed one.
///
/// If the permissions of another user's socket forbid the connection, this cannot tell whether a
/// process serves the socket, and does not remove it. So a proxy that starts as root calls this
/// before it gives up root, for a socket that an earlier proxy made as root.
pub fn remove_left(path: &Path) -> io::Result<bool> {
    let left = is_left(path)?;
    if left {
        fs::remove_file(path)?;
    }
    Ok(left)
}

/// Whether `path` is a socket that no process serves any more.
pub(super) fn is_left(path: &Path) -> io::Result<bool> {
    // Connecting to a file that is not a socket also fails with "connection refused".
    let is_socket = fs::symlink_metadata(path)?.file_type().is_socket();
    let connected = unix_socket::connect_now(path);
    let refused = connected.is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused);
    Ok(is_socket && refused)
}

fn bind_unix(path: &Path) -> Result<std::os::unix::net::UnixListener, AdminError> {
    let failed = |source| AdminError::Socket {
        path: path.to_owned(),
        source,
    };
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(failed)?;
    }
    let bind = || std::os::unix::net::UnixListener::bind(path);
    let listener = match bind() {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            if !remove_left(path).map_err(failed)? {
                return Err(AdminError::Taken(path.to_owned()));
            }
            bind()
        }
        other => other,
    };
    let listener = listener.map_err(failed)?;
    unix_socket::share(path, None).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}

fn bind_metrics(config: &Config) -> Result<Option<std::net::TcpListener>, AdminError> {
    let mut last = None;
    for address in config.metrics_candidates() {
        match bind_shared(address) {
            Ok(listener) => return Ok(Some(listener)),
            // The first failure is reported, because the next address is a second choice.
            Err(error) => last = last.or(Some(error)),
        }
    }
    match last {
        None => Ok(None),
        Some(source) => Err(AdminError::Metrics {
            address: config.flags.metrics_address.to_string(),
            source,
        }),
    }
}

/// Binds with SO_REUSEPORT, so that a surge replica and its predecessor can have the address at
/// once.
fn bind_shared(address: SocketAddr) -> io::Result<std::net::TcpListener> {
    let socket = socket2::Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

fn remove(path: &Path) {
    if let Err(error) = fs::remove_file(path) {
        tracing::debug!(path = %path.display(), %error, "cannot remove the admin socket");
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn only_a_socket_that_no_process_serves_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("admin.sock");
        assert_eq!(
            remove_left(&path).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
        let listener = UnixListener::bind(&path).unwrap();
        assert!(!remove_left(&path).unwrap() && path.exists());
        // A killed process leaves its socket like this.
        drop(listener);
        assert!(remove_left(&path).unwrap() && !path.exists());
        fs::write(&path, "not a socket").unwrap();
        assert!(!remove_left(&path).unwrap() && path.exists());
        assert!(matches!(bind_unix(&path), Err(AdminError::Taken(_))));
    }
}
