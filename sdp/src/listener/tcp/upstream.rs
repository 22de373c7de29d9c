//! A connection to a server. It is opened for the first query, and again if it ended.

use std::{
    future::Future,
    io,
    net::SocketAddr,
    pin::Pin,
    time::{Duration, Instant},
};

use dns_wire::Header;
use shared_maps::IdentityId;
use socket2::SockRef;
use tokio::net::{TcpSocket, TcpStream};

use super::frames::{FrameReader, FrameWriter, Read};
use crate::{
    socket,
    stats::{Count, Counters, Fallback},
    transparent,
};

/// Time within which sent bytes must be acknowledged. The server of an older connection may have
/// disappeared without closing it, like a replaced pod behind a Service. The queries are then sent
/// again on a new connection, before clients give up.
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_millis(500);

type Connecting = Pin<Box<dyn Future<Output = io::Result<TcpStream>> + Send>>;

/// The connection, with the bytes in both directions.
pub(super) struct TcpUpstream {
    server: SocketAddr,
    connecting: Option<Connecting>,
    stream: Option<TcpStream>,
    pub(super) reader: FrameReader,
    out: FrameWriter,
    fallbacks: Counters<Fallback>,
    made: Count,
    /// Time at which the connection was last opened.
    since: Instant,
    /// Ids of queries whose client is gone.
    late: Vec<u16>,
    /// How long the server keeps the connection open without queries, if it stated that.
    pub(super) idle_limit: Option<Duration>,
}

/// The client for which a connection is made.
#[derive(Clone, Copy, Debug)]
pub(super) struct UpstreamIdentity {
    /// Identity in the mark of the packets. `None`: they have no mark.
    pub(super) identity: Option<IdentityId>,
    /// Address from which to connect; `None` for the node's address. Port 0: the kernel selects
    /// one.
    pub(super) source: Option<SocketAddr>,
}

/// An event of the connection.
#[derive(Debug)]
pub(super) enum UpstreamEvent {
    /// Bytes may have arrived; the reader has the complete messages among them.
    Read,
    /// Bytes were sent, or the connection was opened.
    Progress,
    /// The connection ended, or it could not be opened.
    Lost(io::Error),
}

impl TcpUpstream {
    pub(super) fn new(server: SocketAddr, fallbacks: Counters<Fallback>, made: Count) -> Self {
        Self {
            server,
            connecting: None,
            stream: None,
            reader: FrameReader::default(),
            out: FrameWriter::default(),
            fallbacks,
            made,
            since: Instant::now(),
            late: Vec::new(),
            idle_limit: None,
        }
    }

    /// Sends a message. Connects first if there is no connection.
    pub(super) fn send(&mut self, message: &[u8], pod: UpstreamIdentity) {
        if self.stream.is_none() && self.connecting.is_none() {
            self.reader = FrameReader::default();
            self.out.clear();
            self.late.clear();
            self.idle_limit = None;
            self.made.add(1);
            self.since = Instant::now();
            let connecting = connect(self.server, pod, self.fallbacks.clone());
            self.connecting = Some(Box::pin(connecting));
        }
        self.out.push(message);
    }

    /// Whether the connection is open, and every message was sent.
    pub(super) fn is_settled(&self) -> bool {
        self.stream.is_some() && self.out.len() == 0
    }

    /// Time since the connection was opened.
    pub(super) fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.since)
    }

    /// Number of queries without an answer whose client is gone.
    pub(super) fn unanswered(&self) -> usize {
        self.late.len()
    }

    /// Notes that the client of these queries is gone.
    pub(super) fn abandon(&mut self, ids: impl Iterator<Item = u16>) {
        self.late.extend(ids);
    }

    /// Whether a query whose client is gone has this id.
    pub(super) fn has_late(&self, id: u16) -> bool {
        self.late.contains(&id)
    }

    /// Removes the query with this id whose client is gone. Returns whether there is one.
    pub(super) fn ends_late(&mut self, id: u16) -> bool {
        let at = self.late.iter().position(|late| *late == id);
        at.map(|at| self.late.swap_remove(at)).is_some()
    }

    /// Reads and drops late answers while no client uses the connection. An error means that the
    /// connection is of no use: it ended, or the server sent messages without a query.
    pub(super) fn read_late_answers(&mut self) -> io::Result<()> {
        let stream = self.stream.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        match self.reader.fill(stream)? {
            Read::Nothing => return Ok(()),
            Read::End => return Err(io::ErrorKind::UnexpectedEof.into()),
            Read::Some => {}
        }
        let mut message = Vec::new();
        while self.reader.take(&mut message) {
            let id = Header::read(&message).map(|header| header.id);
            if !id.is_some_and(|id| self.ends_late(id)) {
                return Err(io::ErrorKind::InvalidData.into());
            }
        }
        let is_more = self.late.is_empty() && self.reader.is_partial();
        if is_more {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(())
    }

    /// Bytes of memory that its buffers use.
    pub(super) fn memory(&self) -> usize {
        self.reader.memory() + self.out.memory()
    }

    /// Frees large buffers that are empty.
    pub(super) fn shrink(&mut self) {
        self.reader.shrink();
        self.out.shrink();
    }

    /// Waits for an event, forever if there is no connection. Cancel-safe.
    pub(super) async fn happen(&mut self) -> UpstreamEvent {
        if let Some(connecting) = &mut self.connecting {
            let connected = connecting.await;
            self.connecting = None;
            return match connected {
                Ok(stream) => {
                    // It is not set earlier, because it would also limit the time to connect.
                    let limit = Some(ACKNOWLEDGED_WITHIN);
                    if let Err(error) = SockRef::from(&stream).set_tcp_user_timeout(limit) {
                        tracing::debug!(%error, "cannot set TCP_USER_TIMEOUT");
                    }
                    self.stream = Some(stream);
                    UpstreamEvent::Progress
                }
                Err(e) => self.lost(e),
            };
        }
        let Some(stream) = &self.stream else {
            return std::future::pending().await;
        };
        let ready = tokio::select! {
            ready = stream.readable() => ready.map(|()| true),
            ready = stream.writable(), if self.out.len() > 0 => ready.map(|()| false),
        };
        let done = match ready {
            Ok(true) => self.reader.fill(stream).map(|read| match read {
                Read::End => None,
                Read::Some | Read::Nothing => Some(UpstreamEvent::Read),
            }),
            Ok(false) => self
                .out
                .flush(stream)
                .map(|_| Some(UpstreamEvent::Progress)),
            Err(e) => Err(e),
        };
        match done {
            Ok(Some(happened)) => happened,
            Ok(None) => self.lost(io::ErrorKind::UnexpectedEof.into()),
            Err(e) => self.lost(e),
        }
    }

    fn lost(&mut self, error: io::Error) -> UpstreamEvent {
        self.stream = None;
        self.out.clear();
        UpstreamEvent::Lost(error)
    }
}

/// Connects from the pod's address if that is configured and available, otherwise from the node's.
async fn connect(
    server: SocketAddr,
    pod: UpstreamIdentity,
    fallbacks: Counters<Fallback>,
) -> io::Result<TcpStream> {
    if let Some(source) = pod.source {
        let sources = transparent::sources(source, &mut rand::rng());
        let last = sources.len() - 1;
        for (tried, from) in sources.into_iter().enumerate() {
            let reason = match connect_from(server, pod.identity, Some(from)).await {
                Err(error) if !is_of_server(&error) => Fallback::of(&error),
                connected => {
                    if tried > 0 {
                        fallbacks.inc(Fallback::OtherPort);
                    }
                    return connected;
                }
            };
            if reason != Fallback::NoPort || tried == last {
                fallbacks.inc(reason);
                break;
            }
        }
    }
    connect_from(server, pod.identity, None).await
}

async fn connect_from(
    server: SocketAddr,
    identity: Option<IdentityId>,
    source: Option<SocketAddr>,
) -> io::Result<TcpStream> {
    let socket = socket::tcp_upstream(server, identity, source).map_err(|e| e.source)?;
    TcpSocket::from_std_stream(socket.into())
        .connect(server)
        .await
}

/// Whether a connection failed for a reason outside of this node, which would apply to any source
/// address.
fn is_of_server(error: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    matches!(
        error.kind(),
        Kind::ConnectionRefused
            | Kind::ConnectionReset
            | Kind::ConnectionAborted
            | Kind::TimedOut
            | Kind::HostUnreachable
            | Kind::NetworkUnreachable
    )
}
