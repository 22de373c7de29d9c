//! Connections of proxies: bounded in number, and in time while they have no request.
//!
//! If a newer connection takes the place of a connection, or if a connection is idle for too long, its next read or
//! write fails, and the server then drops it.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use daemon::{
    guests::{Activity, Guest},
    peer::Peer,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep},
};
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::transport::server::Connected;

/// How long a connection may be without a request.
#[derive(Clone, Copy, Debug)]
struct Times {
    /// From the accept to the first request.
    first: Duration,
    /// Between two requests. A stream is one request for as long as it lasts.
    idle: Duration,
}

const TIMES: Times = Times {
    first: Duration::from_secs(10),
    idle: Duration::from_secs(60),
};

/// Maximum connections of a socket, unless the agent's limits say otherwise.
pub(super) const CONNECTIONS: usize = 256;

/// A connection that counts against the limit, with the data for its requests.
pub(crate) struct Bounded<S, I> {
    stream: S,
    info: I,
    activity: Activity,
    idle: Duration,
    /// When to check next whether there was a request.
    look: Pin<Box<Sleep>>,
    gives_way: Pin<Box<WaitForCancellationFutureOwned>>,
    /// Counts the connection against the limit until this field is dropped.
    _guest: Guest<Peer>,
}

impl<S, I> Bounded<S, I> {
    pub(super) fn new(stream: S, info: I, guest: Guest<Peer>) -> Self {
        Self::timed(stream, info, guest, TIMES)
    }

    fn timed(stream: S, info: I, guest: Guest<Peer>, times: Times) -> Self {
        Self {
            stream,
            info,
            activity: guest.activity(),
            idle: times.idle,
            look: Box::pin(sleep(times.first)),
            gives_way: Box::pin(guest.close().cancelled_owned()),
            _guest: guest,
        }
    }

    /// Why the connection ends now, if it does. Otherwise the task is woken when it may have to end.
    fn end(&mut self, context: &mut Context<'_>) -> Result<(), io::Error> {
        if self.gives_way.as_mut().poll(context).is_ready() {
            return Err(io::Error::new(
                io::ErrorKind::ConnectionAborted,
                "there are too many connections, and this one had to give way",
            ));
        }
        while self.look.as_mut().poll(context).is_ready() {
            if !self.activity.take_used() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let next = Instant::now() + self.idle;
            self.look.as_mut().reset(next);
        }
        Ok(())
    }
}

impl<S, I: Clone + Send + Sync + 'static> Connected for Bounded<S, I> {
    type ConnectInfo = I;

    fn connect_info(&self) -> I {
        self.info.clone()
    }
}

impl<S: AsyncRead + Unpin, I: Unpin> AsyncRead for Bounded<S, I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.end(cx)?;
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin, I: Unpin> AsyncWrite for Bounded<S, I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.end(cx)?;
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.end(cx)?;
        Pin::new(&mut self.stream).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.end(cx)?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use daemon::guests::{ConnectionCounts, Guests};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};

    use super::*;

    const SHORT: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_secs(3600);

    fn bounded(
        guests: &Guests<Peer>,
        first: Duration,
        idle: Duration,
    ) -> (Bounded<DuplexStream, ()>, DuplexStream) {
        let (ours, theirs) = duplex(64);
        let guest = guests.admit(Peer::Unnamed);
        let times = Times { first, idle };
        (Bounded::timed(ours, (), guest, times), theirs)
    }

    #[tokio::test]
    async fn a_connection_that_gives_way_fails_at_every_use() {
        let counts = ConnectionCounts::default();
        let guests = Guests::counted(1, counts.clone());
        let (mut one, _theirs) = bounded(&guests, LONG, LONG);
        one.write_all(b"x").await.unwrap();
        let (mut other, _others) = bounded(&guests, LONG, LONG);
        other.write_all(b"x").await.unwrap();
        for error in [
            one.read_u8().await.unwrap_err(),
            one.flush().await.unwrap_err(),
        ] {
            assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
        }
        assert_eq!(counts.rejected(), 1);
    }

    #[tokio::test]
    async fn a_connection_without_requests_ends_and_one_with_a_stream_does_not() {
        let guests = Guests::new(CONNECTIONS);
        let (mut unused, _theirs) = bounded(&guests, SHORT, LONG);
        let error = unused.read_u8().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);

        let (mut used, mut theirs) = bounded(&guests, SHORT, SHORT);
        let stream = used.activity.busy();
        let writes = async {
            sleep(SHORT * 5).await;
            theirs.write_all(b"y").await.unwrap();
        };
        let (read, ()) = tokio::join!(used.read_u8(), writes);
        assert_eq!(read.unwrap(), b'y');
        drop(stream);
        let error = used.read_u8().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
