//! A client connection's own connection to its server. It is opened for the first query.

use std::{future::Future, io, net::SocketAddr, pin::Pin};

use shared_maps::IdentityId;
use tokio::net::{TcpSocket, TcpStream};

use super::frames::{FrameReader, FrameWriter, Read};
use crate::{
    socket,
    stats::{Counters, Fallback},
    transparent,
};

type Connecting = Pin<Box<dyn Future<Output = io::Result<TcpStream>> + Send>>;

/// The connection, with the bytes in both directions.
pub(super) struct TcpUpstream {
    server: SocketAddr,
    connecting: Option<Connecting>,
    stream: Option<TcpStream>,
    pub(super) reader: FrameReader,
    out: FrameWriter,
    fallbacks: Counters<Fallback>,
}

/// The client for which a connection is made.
#[derive(Clone, Copy, Debug)]
pub(super) struct UpstreamIdentity {
    /// Identity for the mark.
    pub(super) identity: Option<IdentityId>,
    /// Address from which to connect, if not the node's. Port 0: the kernel selects one.
    pub(super) source: Option<SocketAddr>,
}

/// An event of the connection.
#[derive(Debug)]
pub(super) enum UpstreamEvent {
    /// Messages may have arrived.
    Read,
    /// Bytes were sent, or the connection was opened.
    Progress,
    /// The connection ended.
    Lost(io::Error),
}

impl TcpUpstream {
    pub(super) fn new(server: SocketAddr, fallbacks: Counters<Fallback>) -> Self {
        Self {
            server,
            connecting: None,
            stream: None,
            reader: FrameReader::default(),
            out: FrameWriter::default(),
            fallbacks,
        }
    }

    /// Sends a message, connecting if need be.
    pub(super) fn send(&mut self, message: &[u8], pod: UpstreamIdentity) -> io::Result<()> {
        if self.stream.is_none() && self.connecting.is_none() {
            self.reader = FrameReader::default();
            self.out.clear();
            let connecting = connect(self.server, pod, self.fallbacks.clone());
            self.connecting = Some(Box::pin(connecting));
        }
        self.out.push(message);
        Ok(())
    }

    /// Bytes of memory that its buffers use.
    pub(super) fn memory(&self) -> usize {
        self.reader.memory() + self.out.memory()
    }

    /// Gives large buffers back that have nothing in them.
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

/// Connects, from the pod's address if that is configured and available.
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
