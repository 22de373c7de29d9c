//! Counts the bytes of a connection, which show whether the other side still sends or accepts any.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::io::{InspectReader, InspectWriter};

/// Bytes of one connection since its start. All clones share one state.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress(Arc<Totals>);

#[derive(Debug, Default)]
struct Totals {
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
    pub(super) fn count<S>(&self, stream: S) -> impl AsyncRead + AsyncWrite + Send + Unpin + use<S>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin,
    {
        let (reads, writes) = (Arc::clone(&self.0), Arc::clone(&self.0));
        let stream = InspectReader::new(stream, move |bytes: &[u8]| add(&reads.read, bytes));
        InspectWriter::new(stream, move |bytes: &[u8]| add(&writes.written, bytes))
    }
}

fn add(counter: &AtomicU64, bytes: &[u8]) {
    let bytes = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
    counter.fetch_add(bytes, Ordering::Relaxed);
}
