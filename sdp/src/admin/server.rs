//! The sockets of the admin thread.

use std::{
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::{Domain, Socket, Type};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::{OwnedSemaphorePermit, Semaphore},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{AdminError, Desk, Door};
use crate::{config::Config, unix_socket};

/// Connections at once, per socket; more wait in the backlog.
const CONNECTIONS: usize = 32;
const BACKLOG: i32 = 64;
const HEADERS_WITHIN: Duration = Duration::from_secs(5);
/// A connection that takes longer than this for all it asks is cut.
const CONNECTION_LIMIT: Duration = Duration::from_secs(60);

/// Both sockets, bound.
#[derive(Debug)]
pub struct Doors {
    admin: std::os::unix::net::UnixListener,
    path: PathBuf,
    metrics: Option<std::net::TcpListener>,
}

impl Doors {
    /// Binds both.
    pub fn open(config: &Config) -> Result<Self, AdminError> {
        let path = config.admin_socket.clone();
        let admin = bind_unix(&path)?;
        let metrics = bind_metrics(config).inspect_err(|_| remove(&path))?;
        Ok(Self {
            admin,
            path,
            metrics,
        })
    }

    /// Serves both until `stop`.
    pub(super) async fn serve(self, desk: Arc<Desk>, stop: CancellationToken) {
        let tasks = TaskTracker::new();
        let served = async {
            let admin = tokio::net::UnixListener::from_std(self.admin)?;
            let permits = Arc::new(Semaphore::new(CONNECTIONS));
            let local = async {
                loop {
                    let permit = permit(&permits).await?;
                    let stream = accepted(admin.accept().await.map(|(stream, _)| stream)).await;
                    if let Some(stream) = stream {
                        tasks.spawn(connection(stream, Door::Admin, Arc::clone(&desk), permit));
                    }
                }
            };
            let Some(metrics) = self.metrics else {
                return local.await;
            };
            let metrics = tokio::net::TcpListener::from_std(metrics)?;
            let permits = Arc::new(Semaphore::new(CONNECTIONS));
            let remote = async {
                loop {
                    let permit = permit(&permits).await?;
                    let stream = accepted(metrics.accept().await.map(|(stream, _)| stream)).await;
                    if let Some(stream) = stream {
                        tasks.spawn(connection(stream, Door::Metrics, Arc::clone(&desk), permit));
                    }
                }
            };
            tokio::select! {
                ended = local => ended,
                ended = remote => ended,
            }
        };
        tokio::select! {
            ended = served => {
                let ended: io::Result<()> = ended;
                if let Err(error) = ended {
                    tracing::error!(%error, "admin sockets are not served any more");
                }
            }
            () = stop.cancelled() => {}
        }
        remove(&self.path);
    }
}

async fn permit(permits: &Arc<Semaphore>) -> io::Result<OwnedSemaphorePermit> {
    Arc::clone(permits)
        .acquire_owned()
        .await
        .map_err(io::Error::other)
}

/// A failed accept (too many files open) must not become a busy loop.
async fn accepted<S>(stream: io::Result<S>) -> Option<S> {
    match stream {
        Ok(stream) => Some(stream),
        Err(error) => {
            tracing::debug!(%error, "accept failed");
            tokio::time::sleep(Duration::from_millis(50)).await;
            None
        }
    }
}

async fn connection<S>(stream: S, door: Door, desk: Arc<Desk>, _permit: OwnedSemaphorePermit)
where
    S: AsyncRead + AsyncWrite + Unpin + 'static,
{
    let service = service_fn(|request| async {
        Ok::<_, std::convert::Infallible>(desk.answer(door, request).await)
    });
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADERS_WITHIN)
        .serve_connection(TokioIo::new(stream), service);
    match tokio::time::timeout(CONNECTION_LIMIT, serving).await {
        Ok(Ok(())) | Err(_) => {}
        Ok(Err(error)) => tracing::debug!(%error, "admin connection"),
    }
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
            if std::os::unix::net::UnixStream::connect(path).is_ok() {
                return Err(AdminError::Taken(path.to_owned()));
            }
            // Nobody listens: left behind by a process that was killed.
            fs::remove_file(path).and_then(|()| bind())
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
            // The first failure says it best: the next address is a second choice.
            Err(error) => last = last.or(Some(error)),
        }
    }
    match last {
        None => Ok(None),
        Some(source) => Err(AdminError::Metrics {
            address: config.metrics.to_string(),
            source,
        }),
    }
}

/// Binds with SO_REUSEPORT: a surge replica scrapes beside its predecessor.
fn bind_shared(address: SocketAddr) -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
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
