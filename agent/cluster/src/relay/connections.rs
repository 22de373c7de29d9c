//! Connections of agents: bounded in number and time, one task for each.
//!
//! ```text
//!  accepted ─► handshake of TLS ─► no stream ─► one stream ─► no stream ─► closed
//!  └─────────── waiting: few, short ──────────┘ └ a place ┘ └─ waiting ─┘
//! ```
//!
//! When there are too many connections without a stream, the oldest of the address with most of them
//! is closed for the new one. A connection with a stream has one of the places of agents.

use std::{
    hash::{BuildHasher as _, RandomState},
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};

use daemon::guests::{Guest, Guests};
use fqdn_proto::frames::RelayServer;
use hyper::{Request, body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::watch,
    time::{MissedTickBehavior, sleep_until},
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::pki_types::{CertificateDer, UnixTime},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::codegen::Service as _;

use super::{
    bounds::Bounds,
    credentials::Credentials,
    metrics::Refusal,
    paced::Paced,
    places::{Certificate, Who},
    progress::Progress,
    serve::{Service, Shared},
};

/// Pause after a failed accept: the process has no descriptor, or the kernel has no memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Between two pings. What comes back shows that the other side lives; how soon does not matter,
/// because a ping may wait behind a snapshot.
const PING: Duration = Duration::from_secs(20);
/// No ping ends a connection.
const PONG: Duration = Duration::from_secs(24 * 3600);
/// Streams of a connection at once.
const STREAMS: u32 = 1;
/// Bytes of a request's headers.
const HEADERS: u32 = 8 << 10;
/// Bytes of a stream that wait in HTTP/2 for the connection.
const SEND_BUFFER: usize = 128 << 10;
/// Bytes that wait in the kernel: few, so that it shows soon whether the other side takes any.
const SOCKET_BUFFER: usize = 128 << 10;
/// First byte of a client that begins with TLS: a record of a handshake.
const TLS_RECORD: u8 = 0x16;
/// A connection that takes less in [`Bounds::silent`] takes nothing: pings and views are smaller.
const SILENT_BYTES: u64 = 2 << 10;

/// An agent's connection, as its stream sees it. Clones are one.
#[derive(Clone, Debug)]
pub(super) struct Connection(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    peer: SocketAddr,
    who: Who,
    progress: Progress,
    streams: watch::Sender<usize>,
}

/// A stream of a connection, until it is dropped.
#[derive(Debug)]
pub(super) struct Streaming(Connection);

impl Connection {
    /// Address and port of the agent.
    pub(super) fn peer(&self) -> SocketAddr {
        self.0.peer
    }

    /// Address and certificate of the agent, by which it gets a place.
    pub(super) fn who(&self) -> Who {
        self.0.who
    }

    pub(super) fn progress(&self) -> &Progress {
        &self.0.progress
    }

    /// Counts one more stream, until the result is dropped.
    pub(super) fn stream(&self) -> Streaming {
        self.0.streams.send_modify(|streams| *streams += 1);
        Streaming(self.clone())
    }
}

impl Drop for Streaming {
    fn drop(&mut self) {
        let Connection(inner) = &self.0;
        inner.streams.send_modify(|streams| *streams -= 1);
    }
}

/// Accepts the agents' connections and serves each in its own task.
#[derive(Debug)]
pub(super) struct Connections {
    shared: Arc<Shared>,
    /// None = plain text.
    credentials: Option<watch::Receiver<Arc<Credentials>>>,
    bounds: Bounds,
    waiting: Guests<IpAddr>,
    hash: RandomState,
    refusals: Paced,
    tasks: TaskTracker,
    stop: CancellationToken,
}

/// Why a connection ends before the agent closes it.
#[derive(Debug, thiserror::Error)]
enum Closed {
    #[error("the connection of an agent failed: {0}")]
    Failed(String),
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
    #[error("nothing came, and nothing was taken, within {0:?}")]
    Silent(Duration),
    #[error("the renewed CA of --client-ca did not sign its certificate")]
    NotAccepted,
    #[error("the relay stops")]
    Stopping,
}

impl Closed {
    /// None = not for a reason of the relay.
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
        credentials: Option<watch::Receiver<Arc<Credentials>>>,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        let bounds = *shared.bounds();
        Self {
            shared,
            credentials,
            bounds,
            waiting: Guests::new(bounds.waiting),
            hash: RandomState::new(),
            refusals: Paced::default(),
            tasks,
            stop,
        }
    }

    /// Accepts until the relay stops.
    pub(super) async fn serve(self, listener: TcpListener) {
        let all = Arc::new(self);
        loop {
            let accepted = async {
                all.waiting.room().await;
                listener.accept().await
            };
            let accepted = tokio::select! {
                accepted = accepted => accepted,
                () = all.stop.cancelled() => return,
            };
            match accepted {
                Ok((stream, peer)) => {
                    let guest = all.waiting.admit(network(peer.ip()));
                    let connection = Arc::clone(&all).connection(stream, peer, guest);
                    all.tasks.spawn(connection);
                }
                Err(error) => {
                    all.shared.counters.refused.inc(Refusal::Accept);
                    if let Some(left_out) = all.refusals.line(Instant::now()) {
                        tracing::warn!(
                            %error,
                            left_out,
                            "cannot accept a connection; the relay tries again (allow more open \
                             descriptors: LimitNOFILE= in the unit, or ulimit -n)"
                        );
                    }
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    async fn connection(
        self: Arc<Self>,
        stream: TcpStream,
        peer: SocketAddr,
        guest: Guest<IpAddr>,
    ) {
        let Err(closed) = self.carry(stream, peer, guest).await else {
            return;
        };
        let Some(refusal) = closed.refusal() else {
            tracing::debug!(%peer, "{closed}");
            return;
        };
        self.shared.counters.refused.inc(refusal);
        if let Some(left_out) = self.refusals.line(Instant::now()) {
            tracing::warn!(%peer, left_out, "connection closed: {closed}");
        }
    }

    async fn carry(
        &self,
        stream: TcpStream,
        peer: SocketAddr,
        guest: Guest<IpAddr>,
    ) -> Result<(), Closed> {
        let failed = |error: io::Error| Closed::Failed(error.to_string());
        prepare(&stream, self.bounds.silent).map_err(failed)?;
        let progress = Progress::default();
        let close = guest.close();
        let current = self.credentials.clone();
        let used = current
            .as_ref()
            .map(|current| Arc::clone(&current.borrow()));
        let greeted = async {
            greeting(&stream, used.is_some()).await?;
            let stream = progress.count(stream);
            let Some(used) = &used else {
                return Ok((Either::Plain(stream), Vec::new()));
            };
            let accepted = TlsAcceptor::from(used.server()).accept(stream).await;
            let stream = accepted.map_err(Closed::Handshake)?;
            let (_, session) = stream.get_ref();
            let chain = session.peer_certificates().unwrap_or_default().to_vec();
            Ok((Either::Tls(Box::new(stream)), chain))
        };
        let (stream, chain) = tokio::select! {
            greeted = tokio::time::timeout(self.bounds.handshake, greeted) => {
                greeted.map_err(|_| Closed::SlowHandshake(self.bounds.handshake))??
            }
            () = close.cancelled() => return Err(Closed::Crowded),
            () = self.stop.cancelled() => return Err(Closed::Stopping),
        };
        let certificate = chain.first().map(|first| self.hash.hash_one(first));
        let connection = Connection(Arc::new(Inner {
            peer,
            who: Who {
                address: peer.ip().to_canonical(),
                certificate: Certificate(certificate.unwrap_or_default()),
            },
            progress,
            streams: watch::Sender::new(0),
        }));
        let at_work = AtWork {
            all: self,
            connection,
            chain,
            used: used.clone(),
            guest: Some(guest),
        };
        match stream {
            Either::Plain(stream) => at_work.serve(stream, current).await,
            Either::Tls(stream) => at_work.serve(*stream, current).await,
        }
    }
}

enum Either<P, T> {
    Plain(P),
    Tls(Box<T>),
}

/// A connection after its handshake.
struct AtWork<'a> {
    all: &'a Connections,
    connection: Connection,
    /// Certificate chain that the agent has shown; empty without TLS.
    chain: Vec<CertificateDer<'static>>,
    /// The credentials whose authority accepted the agent; none = plain text.
    used: Option<Arc<Credentials>>,
    /// None while it has a stream.
    guest: Option<Guest<IpAddr>>,
}

impl AtWork<'_> {
    async fn serve<S>(
        mut self,
        stream: S,
        mut current: Option<watch::Receiver<Arc<Credentials>>>,
    ) -> Result<(), Closed>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (all, bounds) = (self.all, self.all.bounds);
        let server = RelayServer::new(Service(Arc::clone(&all.shared)));
        let connection = self.connection.clone();
        let service = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(connection.clone());
            server.clone().call(request)
        });
        let http = http(&all.tasks);
        let mut http = pin!(http.serve_connection(TokioIo::new(stream), service));
        let mut streams = self.connection.0.streams.subscribe();
        let mut deadline = tokio::time::Instant::now() + bounds.request;
        let mut life = Life::new(&self.connection.0.progress);
        let mut beats = tokio::time::interval(bounds.silent);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        beats.reset();
        let mut is_stopping = false;
        let stop = all.stop.clone();
        loop {
            let close = self.guest.as_ref().map(Guest::close);
            tokio::select! {
                ended = &mut http => return ended.map_err(|error| Closed::Failed(error.to_string())),
                _ = streams.changed() => {
                    let has_stream = *streams.borrow_and_update() > 0;
                    if has_stream {
                        self.guest = None;
                    } else if self.guest.is_none() {
                        let address = network(self.connection.peer().ip());
                        self.guest = Some(all.waiting.admit(address));
                        deadline = tokio::time::Instant::now() + bounds.request;
                    }
                }
                () = cancelled(close) => return Err(Closed::Crowded),
                () = sleep_until(deadline), if self.guest.is_some() => {
                    return Err(Closed::NoRequest(bounds.request));
                }
                _ = beats.tick() => if !life.goes_on(&self.connection.0.progress) {
                    return Err(Closed::Silent(bounds.silent));
                },
                renewed = renewed(&mut current) => if !self.accepts(&renewed) {
                    return Err(Closed::NotAccepted);
                },
                () = stop.cancelled(), if !is_stopping => {
                    is_stopping = true;
                    http.as_mut().graceful_shutdown();
                }
            }
        }
    }

    /// Whether the authority of renewed credentials accepts the agent.
    fn accepts(&mut self, renewed: &Arc<Credentials>) -> bool {
        let before = self.used.replace(Arc::clone(renewed));
        let is_same = before.is_some_and(|before| before.has_authority_of(renewed));
        is_same || renewed.accepts(&self.chain, UnixTime::now())
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

/// Bytes of a connection at the last look.
struct Life {
    read: u64,
    written: u64,
}

impl Life {
    fn new(progress: &Progress) -> Self {
        Self {
            read: progress.read(),
            written: progress.written(),
        }
    }

    /// Whether anything came, or was taken, since the last look.
    fn goes_on(&mut self, progress: &Progress) -> bool {
        let now = Self::new(progress);
        let goes_on = now.read > self.read || now.written - self.written >= SILENT_BYTES;
        *self = now;
        goes_on
    }
}

/// Sets the options of a socket.
fn prepare(stream: &TcpStream, silent: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    socket.set_send_buffer_size(SOCKET_BUFFER)?;
    // A host that is gone acknowledges nothing, and views are sent every few seconds.
    socket.set_tcp_user_timeout(Some(silent))
}

/// Waits for the first byte: whether the other side begins with TLS.
async fn greeting(stream: &TcpStream, is_tls: bool) -> Result<(), Closed> {
    let mut first = [0];
    let bytes = stream.peek(&mut first).await;
    let bytes = bytes.map_err(|error| Closed::Failed(error.to_string()))?;
    match (bytes, first == [TLS_RECORD], is_tls) {
        (0, ..) => Err(Closed::Failed("closed without a request".to_owned())),
        (_, is_record, _) if is_record == is_tls => Ok(()),
        _ => {
            // A connection that is closed with bytes unread is reset, and the other side reports
            // that only.
            let _bytes = stream.try_read(&mut [0; 4096]);
            Err(if is_tls { Closed::NoTls } else { Closed::Tls })
        }
    }
}

/// Waits for the next renewed credentials. It never returns without TLS, or when no more will come.
async fn renewed(current: &mut Option<watch::Receiver<Arc<Credentials>>>) -> Arc<Credentials> {
    if let Some(current) = current
        && current.changed().await.is_ok()
    {
        return Arc::clone(&current.borrow_and_update());
    }
    std::future::pending().await
}

async fn cancelled(close: Option<CancellationToken>) {
    match close {
        Some(close) => close.cancelled_owned().await,
        None => std::future::pending().await,
    }
}

/// One host: an address, or the network (/64) that one host of IPv6 may have to itself.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address @ IpAddr::V4(_) => address,
    }
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

#[cfg(test)]
#[path = "connections_tests.rs"]
mod tests;
