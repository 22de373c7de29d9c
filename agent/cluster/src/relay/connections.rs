//! Connections of agents: bounded in number and time, one task for each.
//!
//! ```text
//!  accepted ─► handshake of TLS ─► no stream ─► one stream ─► no stream ─► closed
//!  └─────────── waiting: few, short ──────────┘ └ a place ┘ └─ waiting ─┘
//! ```
//!
//! When there are too many connections without a stream, a new connection displaces another one. The address with the
//! most connections without a stream loses the oldest of these. A connection with a stream has one of the places of
//! agents.

use std::{
    error::Error,
    hash::{BuildHasher as _, RandomState},
    io,
    net::SocketAddr,
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};

use daemon::{
    guests::{Guest, Guests},
    peer::Peer,
};
use fqdn_proto::frames::RelayServer;
use hyper::{Request, body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::watch,
    time::sleep,
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::pki_types::{CertificateDer, UnixTime},
};
use tokio_util::{either::Either, sync::CancellationToken, task::TaskTracker};
use tonic::codegen::Service as _;

use super::{
    credentials::Credentials,
    paced::Paced,
    places::{Certificate, Who},
    progress::Progress,
    serve::{Service, Shared},
};
use crate::relay_refusal::Refusal;

/// Time between two pings. Any answer shows that the other side lives. Its delay does not matter,
/// because a ping may wait behind a snapshot.
const PING: Duration = Duration::from_secs(20);
/// Time to wait for the answer to a ping: so long that no ping ends a connection.
const PONG: Duration = Duration::from_secs(24 * 3600);
/// Maximum number of streams of a connection at once.
const STREAMS: u32 = 1;
/// Maximum size of a request's headers, in bytes.
const HEADERS: u32 = 8 << 10;
/// Maximum number of bytes of a stream that wait in HTTP/2 for the connection.
const SEND_BUFFER: usize = 128 << 10;
/// Bytes that wait in the kernel: few, so that the relay soon sees whether the other side takes any.
const SOCKET_BUFFER: usize = 128 << 10;
/// First byte of a client that begins with TLS: a record of a handshake.
const TLS_RECORD: u8 = 0x16;
/// A connection that accepts fewer bytes than this within `Bounds::silent` counts as one that
/// accepts nothing. Pings and views (the relay's reports of how current its objects are) alone have
/// fewer bytes.
const SILENT_BYTES: u64 = 2 << 10;

/// An agent's connection, as its streams see it.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) peer: SocketAddr,
    /// Address and certificate of the agent, by which it gets a place.
    pub(super) who: Who,
    pub(super) progress: Progress,
    /// Number of streams.
    streams: watch::Sender<usize>,
}

/// A stream of a connection, until it is dropped.
#[derive(Debug)]
pub(super) struct Streaming(Arc<Connection>);

impl Connection {
    /// Counts one more stream, until the result is dropped.
    pub(super) fn stream(self: &Arc<Self>) -> Streaming {
        self.streams.send_modify(|streams| *streams += 1);
        Streaming(Arc::clone(self))
    }
}

impl Drop for Streaming {
    fn drop(&mut self) {
        self.0.streams.send_modify(|streams| *streams -= 1);
    }
}

/// Credentials, as they are renewed.
type Renewed = watch::Receiver<Arc<Credentials>>;

/// Accepts the agents' connections and serves each in its own task.
#[derive(Debug)]
pub(super) struct Connections {
    shared: Arc<Shared>,
    /// `None` = plain text.
    credentials: Option<Renewed>,
    waiting: Guests<Peer>,
    hash: RandomState,
    refusals: Paced,
    tasks: TaskTracker,
    stop: CancellationToken,
}

/// Why a connection ends before the agent closes it.
#[derive(Debug, thiserror::Error)]
enum Closed {
    #[error("the connection of an agent failed: {0}")]
    Failed(Box<dyn Error + Send + Sync>),
    #[error(
        "it sends no TLS, and this relay serves with TLS: start the agent with --k8s-relay-ca, \
         --k8s-relay-cert and --k8s-relay-key in the place of --k8s-relay-plaintext"
    )]
    NoTls,
    #[error(
        "it sends TLS, and this relay serves without: start the relay with --tls-cert, --tls-key and \
         --client-ca in the place of --plaintext"
    )]
    Tls,
    #[error("the handshake of TLS failed: {0}")]
    Handshake(io::Error),
    #[error("no handshake of TLS within {0:?}")]
    SlowHandshake(Duration),
    #[error("no request within {0:?}")]
    NoRequest(Duration),
    #[error("there are too many connections without a request, most of them from its address")]
    Crowded,
    #[error("the agent sent nothing, and accepted less than 2 KiB, within {0:?}")]
    Silent(Duration),
    #[error("the renewed CA of --client-ca did not sign its certificate")]
    NotAccepted,
    #[error("the relay stops")]
    Stopping,
}

impl Closed {
    /// `None` = not a refusal: the connection failed, or the relay stops.
    fn refusal(&self) -> Option<Refusal> {
        Some(match self {
            Self::Failed(_) | Self::Stopping => return None,
            Self::NoTls | Self::Tls | Self::Handshake(_) | Self::SlowHandshake(_) => {
                Refusal::Handshake
            }
            Self::NoRequest(_) => Refusal::NoRequest,
            Self::Crowded => Refusal::Crowded,
            Self::Silent(_) => Refusal::Silent,
            Self::NotAccepted => Refusal::Certificate,
        })
    }
}

impl Connections {
    pub(super) fn new(
        shared: Arc<Shared>,
        credentials: Option<Renewed>,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        Self {
            waiting: Guests::new(shared.bounds().waiting),
            shared,
            credentials,
            hash: RandomState::new(),
            refusals: Paced::default(),
            tasks,
            stop,
        }
    }

    /// Accepts until the relay stops.
    pub(super) async fn serve(self, listener: TcpListener) {
        let all = Arc::new(self);
        let failed = |error: io::Error| {
            if let Some(left_out) = all.refuse(Refusal::Accept) {
                tracing::warn!(
                    %error,
                    left_out,
                    "cannot accept a connection; the relay tries again (allow more open \
                     descriptors: LimitNOFILE= in the unit, or ulimit -n)"
                );
            }
        };
        let accepting = async {
            loop {
                let accepted = all.waiting.accept(|| listener.accept(), failed).await;
                let (stream, peer) = accepted;
                let guest = all.waiting.admit(Peer::of_address(peer.ip()));
                let connection = Arc::clone(&all).connection(stream, peer, guest);
                all.tasks.spawn(connection);
            }
        };
        all.stop.run_until_cancelled(accepting).await;
    }

    /// Counts a refusal. If it may be logged, the result is how many lines were left out before.
    fn refuse(&self, refusal: Refusal) -> Option<u64> {
        self.shared.counters.refused.inc(refusal);
        self.refusals.line(Instant::now())
    }

    async fn connection(self: Arc<Self>, stream: TcpStream, peer: SocketAddr, guest: Guest<Peer>) {
        let Err(closed) = self.carry(stream, peer, guest).await else {
            return;
        };
        match closed.refusal() {
            None => tracing::debug!(%peer, "{closed}"),
            Some(refusal) => {
                if let Some(left_out) = self.refuse(refusal) {
                    tracing::warn!(%peer, left_out, "connection closed: {closed}");
                }
            }
        }
    }

    async fn carry(
        &self,
        stream: TcpStream,
        peer: SocketAddr,
        guest: Guest<Peer>,
    ) -> Result<(), Closed> {
        let bounds = self.shared.bounds();
        prepare(&stream, bounds.silent).map_err(failed)?;
        let progress = Progress::default();
        let credentials = self.credentials.clone().map(|mut renewed| {
            let used = Arc::clone(&renewed.borrow_and_update());
            (used, renewed)
        });
        let greeted = async {
            greeting(&stream, credentials.is_some()).await?;
            let stream = progress.count(stream);
            let Some((used, _)) = &credentials else {
                return Ok((Either::Left(stream), Vec::new()));
            };
            let accepted = TlsAcceptor::from(used.server()).accept(stream).await;
            let stream = accepted.map_err(Closed::Handshake)?;
            let (_, session) = stream.get_ref();
            let chain = session.peer_certificates().unwrap_or_default().to_vec();
            Ok((Either::Right(stream), chain))
        };
        let close = guest.close();
        let (stream, chain) = tokio::select! {
            greeted = tokio::time::timeout(bounds.handshake, greeted) => {
                greeted.map_err(|_| Closed::SlowHandshake(bounds.handshake))??
            }
            () = close.cancelled() => return Err(Closed::Crowded),
            () = self.stop.cancelled() => return Err(Closed::Stopping),
        };
        let certificate = chain.first().map(|first| self.hash.hash_one(first));
        let connection = Arc::new(Connection {
            peer,
            who: Who {
                address: peer.ip().to_canonical(),
                certificate: Certificate(certificate.unwrap_or_default()),
            },
            progress,
            streams: watch::Sender::new(0),
        });
        let end = async {
            tokio::select! {
                closed = self.no_stream(&connection, guest) => closed,
                () = silence(&connection.progress, bounds.silent) => Closed::Silent(bounds.silent),
                () = other_authority(credentials, &chain) => Closed::NotAccepted,
            }
        };
        self.serve_until(end, stream, Arc::clone(&connection)).await
    }

    /// Serves the requests of a connection after its handshake.
    async fn serve_until<S>(
        &self,
        end: impl Future<Output = Closed>,
        stream: S,
        connection: Arc<Connection>,
    ) -> Result<(), Closed>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send,
    {
        let server = RelayServer::new(Service(Arc::clone(&self.shared)));
        let service = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(Arc::clone(&connection));
            server.clone().call(request)
        });
        // Dropped last: the socket is closed before the connection's room is free.
        let mut end = pin!(end);
        let mut http = pin!(http(&self.tasks).serve_connection(TokioIo::new(stream), service));
        let mut is_stopping = false;
        loop {
            tokio::select! {
                ended = &mut http => return ended.map_err(failed),
                closed = &mut end => return Err(closed),
                () = self.stop.cancelled(), if !is_stopping => {
                    is_stopping = true;
                    http.as_mut().graceful_shutdown();
                }
            }
        }
    }

    /// Returns when the connection has no stream, and must give way or has had none for too long.
    async fn no_stream(&self, connection: &Connection, mut guest: Guest<Peer>) -> Closed {
        let limit = self.shared.bounds().request;
        let mut streams = connection.streams.subscribe();
        loop {
            let close = guest.close();
            tokio::select! {
                _ = streams.wait_for(|streams| *streams > 0) => drop(guest),
                () = close.cancelled() => return Closed::Crowded,
                () = sleep(limit) => return Closed::NoRequest(limit),
            }
            drop(streams.wait_for(|streams| *streams == 0).await);
            guest = self.waiting.admit(Peer::of_address(connection.peer.ip()));
        }
    }
}

fn failed(error: impl Into<Box<dyn Error + Send + Sync>>) -> Closed {
    Closed::Failed(error.into())
}

/// Runs the streams of connections.
#[derive(Clone, Debug)]
struct Tasks(TaskTracker);

impl<F> hyper::rt::Executor<F> for Tasks
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, future: F) {
        self.0.spawn(future);
    }
}

fn http(tasks: &TaskTracker) -> http2::Builder<Tasks> {
    let mut http = http2::Builder::new(Tasks(tasks.clone()));
    http.timer(TokioTimer::new())
        .keep_alive_interval(PING)
        .keep_alive_timeout(PONG)
        .max_concurrent_streams(STREAMS)
        .max_header_list_size(HEADERS)
        .max_send_buf_size(SEND_BUFFER);
    http
}

/// Waits until the other side has sent nothing, and accepted fewer than [`SILENT_BYTES`], for a whole `limit`.
async fn silence(progress: &Progress, limit: Duration) {
    loop {
        let (read, written) = (progress.read(), progress.written());
        sleep(limit).await;
        if progress.read() == read && progress.written() - written < SILENT_BYTES {
            return;
        }
    }
}

/// Waits until renewed credentials have an authority that does not accept the agent. Never returns without TLS, or when
/// no credentials are renewed any more.
async fn other_authority(
    credentials: Option<(Arc<Credentials>, Renewed)>,
    chain: &[CertificateDer<'static>],
) {
    if let Some((mut used, mut renewed)) = credentials {
        while renewed.changed().await.is_ok() {
            let before = used;
            used = Arc::clone(&renewed.borrow_and_update());
            if !used.has_authority_of(&before) && !used.accepts(chain, UnixTime::now()) {
                return;
            }
        }
    }
    std::future::pending().await
}

/// Sets the options of a socket.
fn prepare(stream: &TcpStream, silent: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    socket.set_send_buffer_size(SOCKET_BUFFER)?;
    // A host that is gone acknowledges nothing, and the relay sends something (a view) every few
    // seconds.
    socket.set_tcp_user_timeout(Some(silent))
}

/// Waits for the first byte: whether the other side begins with TLS.
async fn greeting(stream: &TcpStream, is_tls: bool) -> Result<(), Closed> {
    let mut first = [0];
    let bytes = stream.peek(&mut first).await.map_err(failed)?;
    match (bytes, first == [TLS_RECORD], is_tls) {
        (0, ..) => Err(failed("closed without a request")),
        (_, is_record, _) if is_record == is_tls => Ok(()),
        _ => {
            // A connection that is closed with bytes unread is reset, and the other side reports
            // that only.
            let _bytes = stream.try_read(&mut [0; 4096]);
            Err(if is_tls { Closed::NoTls } else { Closed::Tls })
        }
    }
}

#[cfg(test)]
#[path = "connections_tests.rs"]
mod tests;
