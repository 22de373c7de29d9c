//! Bytes of a connection: whether its other side still takes or sends any.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes of one connection since its start. Clones are one.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress(Arc<Counters>);

#[derive(Debug, Default)]
struct Counters {
    read: AtomicU64,
    written: AtomicU64,
}

impl Progress {
    /// Bytes read from the other side.
    pub(super) fn read(&self) -> u64 {
        self.0.read.load(Ordering::Relaxed)
    }

    /// Bytes that the kernel took for the other side.
    pub(super) fn written(&self) -> u64 {
        self.0.written.load(Ordering::Relaxed)
    }

    /// Wraps `stream` so that its bytes are counted here.
    pub(super) fn count<S>(&self, stream: S) -> Counted<S> {
        Counted {
            stream,
            progress: self.clone(),
        }
    }
}

/// A stream with its bytes counted.
#[derive(Debug)]
pub(super) struct Counted<S> {
    stream: S,
    progress: Progress,
}

impl<S: AsyncRead + Unpin> AsyncRead for Counted<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        let bytes = buffer.filled().len().saturating_sub(before);
        add(&self.progress.0.read, bytes);
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Counted<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, buffer);
        self.note(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, buffers);
        self.note(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl<S> Counted<S> {
    fn note(&self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Ok(bytes)) = &written {
            add(&self.progress.0.written, *bytes);
        }
        written
    }
}

fn add(counter: &AtomicU64, bytes: usize) {
    let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
    counter.fetch_add(bytes, Ordering::Relaxed);
}
