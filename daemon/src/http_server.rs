//! HTTP/1 on sockets that anybody may connect to: bounded connections, and always room for one
//! more peer.

use std::{convert::Infallible, io, sync::Arc, time::Duration};

use http_body_util::Full;
use hyper::{
    Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header::{CONTENT_TYPE, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, UnixListener},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    command_line::metrics_address::MetricsAddress,
    guests::{ConnectionCounts, Guest, Guests},
    peer::Peer,
    tcp_owner::TcpOwners,
};

/// Content type of plain text in UTF-8.
pub const TEXT: &str = "text/plain; charset=utf-8";
/// Content type of JSON.
pub const JSON: &str = "application/json";
/// Content type of metrics in OpenMetrics 1.0.
pub const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Binds the address of `--metrics-address`, if there is one.
///
/// # Errors
/// The address cannot be bound. The text names the flag.
pub async fn bind_metrics(address: &MetricsAddress) -> io::Result<Option<TcpListener>> {
    let mut first = None;
    for candidate in address.candidates() {
        match TcpListener::bind(candidate).await {
            Ok(listener) => return Ok(Some(listener)),
            // The first error is reported, because later addresses are a second choice.
            Err(error) => first = first.or(Some(error)),
        }
    }
    match first {
        None => Ok(None),
        Some(error) => Err(io::Error::other(format!(
            "--metrics-address {address}: {error}; choose another address, or \"off\""
        ))),
    }
}

/// A whole answer with a content type.
pub fn answer(
    status: StatusCode,
    kind: &'static str,
    body: impl Into<Bytes>,
) -> Response<Full<Bytes>> {
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = status;
    let kind = HeaderValue::from_static(kind);
    answer.headers_mut().insert(CONTENT_TYPE, kind);
    answer
}

/// Limits for the peers of one socket.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of connections at once. To admit one more, the oldest idle connection of the
    /// peer with the most connections is closed.
    pub connections: usize,
    /// Longest time from a connection's start, or the end of an answer, until the next request's
    /// headers have arrived.
    pub headers_within: Duration,
    /// Time after which a connection is closed, even during a request.
    pub life: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 64,
            headers_within: Duration::from_secs(5),
            life: Duration::from_secs(60),
        }
    }
}

/// A listening socket, by the kind of its peers.
#[derive(Debug)]
pub enum Socket {
    /// TCP; each address is a peer, and over loopback each user.
    Tcp(TcpListener),
    /// Unix; each process is a peer.
    Unix(UnixListener),
}

/// Which users may connect to a unix socket, in addition to its permissions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Users {
    /// Every user that its permissions let connect.
    #[default]
    Any,
    /// Root, and the user of this process.
    Own,
}

impl Users {
    fn admits(self, user: u32) -> bool {
        match self {
            Self::Any => true,
            Self::Own => user == 0 || user == nix::unistd::geteuid().as_raw(),
        }
    }
}

/// Which peers a socket serves, and how many.
#[derive(Clone, Debug, Default)]
pub struct Admission {
    /// Limits for the peers of this socket.
    pub limits: Limits,
    /// Users that a unix socket serves. TCP sockets ignore it.
    pub users: Users,
    /// Counters of open and rejected connections, for metrics.
    pub counts: ConnectionCounts,
}

/// A TCP or unix stream.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// Serves requests until `stop`. Each connection is a task of `tasks`.
pub async fn serve<S, F>(
    socket: Socket,
    admission: Admission,
    service: S,
    tasks: TaskTracker,
    stop: CancellationToken,
) where
    S: Fn(Request<Incoming>) -> F + Send + Sync + 'static,
    F: Future<Output = Response<Full<Bytes>>> + Send + 'static,
{
    let service = Arc::new(service);
    let Admission {
        limits,
        users,
        counts,
    } = admission;
    let guests = Guests::counted(limits.connections, counts);
    let owners = TcpOwners::open().ok();
    loop {
        let accepted = guests.accept(
            || socket.accept(users, owners.as_ref()),
            |error| tracing::debug!(%error, "cannot accept an HTTP connection"),
        );
        let Some(accepted) = stop.run_until_cancelled(accepted).await else {
            return;
        };
        let Some((stream, peer)) = accepted else {
            guests.reject();
            continue;
        };
        let guest = guests.admit(peer);
        let (service, stop) = (Arc::clone(&service), stop.clone());
        tasks.spawn(async move {
            let close = guest.close();
            tokio::select! {
                () = connection(stream, limits, service, &guest) => {}
                () = tokio::time::sleep(limits.life) => {}
                () = close.cancelled() => {}
                () = stop.cancelled() => {}
            }
        });
    }
}

async fn connection<S, F>(
    stream: Box<dyn Stream>,
    limits: Limits,
    service: Arc<S>,
    guest: &Guest<Peer>,
) where
    S: Fn(Request<Incoming>) -> F,
    F: Future<Output = Response<Full<Bytes>>>,
{
    let service = service_fn(|request| {
        let answer = service(request);
        async {
            let _busy = guest.busy();
            Ok::<_, Infallible>(answer.await)
        }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.headers_within)
        .serve_connection(TokioIo::new(stream), service)
        .await;
    if let Err(error) = served {
        tracing::debug!(%error, "HTTP connection failed");
    }
}

impl Socket {
    /// The next connection; `None` if its user may not connect.
    async fn accept(
        &self,
        users: Users,
        owners: Option<&TcpOwners>,
    ) -> io::Result<Option<(Box<dyn Stream>, Peer)>> {
        match self {
            Self::Tcp(listener) => {
                let (stream, from) = listener.accept().await?;
                let peer = match (owners, stream.local_addr()) {
                    (Some(owners), Ok(to)) if from.ip().to_canonical().is_loopback() => {
                        Peer::of_loopback(owners, from, to)
                    }
                    _ => Peer::of_address(from.ip()),
                };
                Ok(Some((Box::new(stream), peer)))
            }
            Self::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                let peer = Peer::of_process(&stream);
                let admitted = peer.user().is_none_or(|user| users.admits(user));
                Ok(admitted.then(|| (Box::new(stream) as Box<dyn Stream>, peer)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use polling::until_async;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpStream,
    };

    use super::*;

    /// Far longer than any test here takes.
    const TEST_TIMEOUT: Duration = Duration::from_secs(20);
    /// Limits whose times are too long to end a connection of a test.
    const LIMITS: Limits = Limits {
        connections: 8,
        headers_within: Duration::from_secs(3600),
        life: Duration::from_secs(3600),
    };

    async fn patient<T>(what: impl Future<Output = T>) -> T {
        let done = tokio::time::timeout(TEST_TIMEOUT, what).await;
        done.expect("it does not take for ever")
    }

    async fn ask(mut stream: &mut TcpStream) -> Vec<u8> {
        let request = b"GET /readyz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
        stream.write_all(request).await.unwrap();
        let mut answer = Vec::new();
        patient((&mut stream).read_to_end(&mut answer))
            .await
            .unwrap();
        answer
    }

    #[tokio::test]
    async fn idle_connections_do_not_silence_a_probe() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let service = |_| async { Response::new(Full::new(Bytes::from("ready"))) };
        let served = serve(
            Socket::Tcp(listener),
            Admission {
                limits: LIMITS,
                ..Admission::default()
            },
            service,
            tasks.clone(),
            stop.clone(),
        );
        let client = async {
            let mut idle = Vec::new();
            for _ in 0..115 {
                idle.push(TcpStream::connect(address).await.unwrap());
            }
            let mut probe = TcpStream::connect(address).await.unwrap();
            let answer = ask(&mut probe).await;
            assert!(answer.ends_with(b"ready"), "{answer:?}");
            // The oldest connection was closed, and the newest are still open.
            let first = idle.first_mut().unwrap();
            assert_eq!(patient(first.read(&mut [0])).await.unwrap(), 0);
            let served = || tasks.len();
            until_async("the limit holds", served, |n| *n <= LIMITS.connections).await;
            let last = idle.last_mut().unwrap();
            assert!(ask(last).await.ends_with(b"ready"));
            stop.cancel();
        };
        tokio::join!(served, client);
        tasks.close();
        patient(tasks.wait()).await;
    }
}
