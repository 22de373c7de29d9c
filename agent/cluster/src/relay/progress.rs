//! Octets of a connection: whether its other side still takes or sends any.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::io::{InspectReader, InspectWriter};

/// Octets of one connection since its start. Clones are one.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress(Arc<Octets>);

#[derive(Debug, Default)]
struct Octets {
    read: AtomicU64,
    written: AtomicU64,
}

impl Progress {
    /// Octets read from the other side.
    pub(super) fn read(&self) -> u64 {
        self.0.read.load(Ordering::Relaxed)
    }

    /// Octets that the kernel took for the other side.
    pub(super) fn written(&self) -> u64 {
        self.0.written.load(Ordering::Relaxed)
    }

    /// Wraps `stream` so that its octets are counted here.
    pub(super) fn count<S>(&self, stream: S) -> impl AsyncRead + AsyncWrite + Send + Unpin + use<S>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin,
    {
        let (reads, writes) = (Arc::clone(&self.0), Arc::clone(&self.0));
        let stream = InspectReader::new(stream, move |octets: &[u8]| add(&reads.read, octets));
        InspectWriter::new(stream, move |octets: &[u8]| add(&writes.written, octets))
    }
}

fn add(counter: &AtomicU64, octets: &[u8]) {
    let octets = u64::try_from(octets.len()).unwrap_or(u64::MAX);
    counter.fetch_add(octets, Ordering::Relaxed);
}
