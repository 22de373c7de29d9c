//! One end of a connection between a proxy and its agent, over a unix socket.
//!
//! A tokio stream always waits for room to write, too: each time the peer reads, the kernel wakes
//! the thread of this end needlessly. [`LinkStream`] waits for room only while a write is blocked.

mod register;

use std::{
    io::{self, ErrorKind, IoSlice, Read as _, Write as _},
    net::Shutdown,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker, ready},
};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf, unix::AsyncFd};

use self::register::register;

/// A unix stream that waits for room only while a write is blocked.
#[derive(Debug)]
pub struct LinkStream {
    /// The socket, registered for reading only.
    socket: AsyncFd<UnixStream>,
    /// The same socket, registered for writing while a write is blocked.
    blocked: Option<AsyncFd<UnixStream>>,
    read_now: ReadNow,
}

/// Makes a stream look for data although its thread was not woken. The kernel may take longer to
/// wake that thread than the peer takes to answer.
#[derive(Clone, Debug, Default)]
pub struct ReadNow(Arc<Request>);

#[derive(Debug, Default)]
struct Request {
    pending: AtomicBool,
    /// Waker of the task that waits for data.
    reader: Mutex<Option<Waker>>,
}

impl ReadNow {
    /// Wakes the task that waits for data, which reads when it is polled.
    pub fn request(&self) {
        self.0.pending.store(true, Ordering::Release);
        if let Some(reader) = &*self.0.reader.lock() {
            reader.wake_by_ref();
        }
    }

    fn take(&self) -> bool {
        self.0.pending.load(Ordering::Relaxed) && self.0.pending.swap(false, Ordering::Acquire)
    }

    fn set_reader(&self, waker: &Waker) {
        let mut reader = self.0.reader.lock();
        match &mut *reader {
            Some(reader) => reader.clone_from(waker),
            None => *reader = Some(waker.clone()),
        }
    }
}

impl LinkStream {
    /// `stream` belongs to the runtime of the caller from now on.
    pub fn new(stream: tokio::net::UnixStream) -> io::Result<Self> {
        Self::with_read_now(stream, ReadNow::default())
    }

    /// Like [`Self::new`]; `read_now` makes the stream look for data.
    pub fn with_read_now(stream: tokio::net::UnixStream, read_now: ReadNow) -> io::Result<Self> {
        let socket = register(stream.into_std()?, Interest::READABLE)?;
        Ok(Self {
            socket,
            blocked: None,
            read_now,
        })
    }

    /// Writes with `write`, which does not block; waits if there is no room.
    fn poll_write_with(
        &mut self,
        context: &mut Context<'_>,
        mut write: impl FnMut(&UnixStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            let Some(blocked) = &self.blocked else {
                match write(self.socket.get_ref()) {
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        let socket = self.socket.get_ref().try_clone()?;
                        let socket = register(socket, Interest::WRITABLE)?;
                        self.blocked = Some(socket);
                    }
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    written => return Poll::Ready(written),
                }
                continue;
            };
            let mut room = ready!(blocked.poll_write_ready(context))?;
            match write(blocked.get_ref()) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => room.clear_ready(),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                written => {
                    self.blocked = None;
                    return Poll::Ready(written);
                }
            }
        }
    }
}

/// Reads the available bytes; `None` if there are none.
fn read(mut socket: &UnixStream, into: &mut ReadBuf<'_>) -> Option<io::Result<usize>> {
    loop {
        match socket.read(into.initialize_unfilled()) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Some(Err(error)),
            Ok(length) => {
                into.advance(length);
                return Some(Ok(length));
            }
        }
    }
}

impl AsFd for LinkStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.get_ref().as_fd()
    }
}

impl AsyncRead for LinkStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let wanted = into.remaining();
        if self.read_now.take()
            && let Some(length) = read(self.socket.get_ref(), into)
        {
            return Poll::Ready(length.map(drop));
        }
        loop {
            let Poll::Ready(readable) = self.socket.poll_read_ready(context) else {
                self.read_now.set_reader(context.waker());
                return Poll::Pending;
            };
            let mut readable = readable?;
            let Some(length) = read(readable.get_inner(), into) else {
                readable.clear_ready();
                continue;
            };
            // A short read means that no bytes are left. Later bytes cause an event of their own.
            if matches!(length, Ok(length) if length > 0 && length < wanted) {
                readable.clear_ready();
            }
            return Poll::Ready(length.map(drop));
        }
    }
}

impl AsyncWrite for LinkStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.get_mut()
            .poll_write_with(context, |mut socket| socket.write(bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.get_mut()
            .poll_write_with(context, |mut socket| socket.write_vectored(parts))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.socket.get_ref().shutdown(Shutdown::Write))
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::fd::AsRawFd as _};

    use nix::sys::epoll::EpollFlags;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    /// Events for which an epoll instance of this process watches a socket.
    fn watched(socket: &impl AsFd) -> EpollFlags {
        let number = socket.as_fd().as_raw_fd().to_string();
        let mut flags = EpollFlags::empty();
        for entry in fs::read_dir("/proc/self/fdinfo").unwrap() {
            // Another test may have closed the descriptor.
            let text = fs::read_to_string(entry.unwrap().path()).unwrap_or_default();
            for line in text.lines() {
                let words: Vec<_> = line.split_whitespace().collect();
                if let ["tfd:", watched, "events:", events, ..] = words[..]
                    && watched == number
                {
                    let events = u32::from_str_radix(events, 16).unwrap_or_default();
                    flags |= EpollFlags::from_bits_truncate(events.cast_signed());
                }
            }
        }
        flags
    }

    #[tokio::test]
    async fn the_thread_is_not_woken_when_the_peer_reads() {
        let (ours, _peer) = tokio::net::UnixStream::pair().unwrap();
        assert!(watched(&ours).contains(EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT));
        let mut stream = LinkStream::new(ours).unwrap();
        stream.write_all(b"query").await.unwrap();
        let events = watched(&stream);
        assert!(events.contains(EpollFlags::EPOLLIN), "{events:?}");
        assert!(!events.contains(EpollFlags::EPOLLOUT), "{events:?}");
    }

    #[tokio::test]
    async fn more_than_the_socket_holds_arrives_both_ways() {
        let (left, right) = tokio::net::UnixStream::pair().unwrap();
        let ends = [left, right].map(|end| LinkStream::new(end).unwrap());
        let sent: Vec<u8> = (0..8_u32 << 20).map(|at| (at % 251) as u8).collect();
        let moved = ends.map(|end| {
            let sent = sent.clone();
            async move {
                let (mut read, mut write) = tokio::io::split(end);
                let mut received = Vec::new();
                let sending = async {
                    write.write_all(&sent).await.unwrap();
                    write.shutdown().await.unwrap();
                };
                let (read, ()) = tokio::join!(read.read_to_end(&mut received), sending);
                read.unwrap();
                received
            }
        });
        let [left, right] = moved;
        let (left, right) = tokio::join!(left, right);
        assert!(left == sent && right == sent);
    }
}
