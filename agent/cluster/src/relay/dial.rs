//! Connects to a relay, and counts the bytes of the connection.

use std::{
    io,
    task::{Context, Poll},
};

use hyper::Uri;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tonic::codegen::{BoxFuture, Service};

use super::progress::{Counted, Progress};

/// Opens the TCP connection to one relay.
#[derive(Clone, Debug)]
pub(super) struct Dial {
    /// `host:port`.
    address: String,
    progress: Progress,
}

impl Dial {
    pub(super) fn new(address: String, progress: Progress) -> Self {
        Self { address, progress }
    }
}

impl Service<Uri> for Dial {
    type Response = TokioIo<Counted<TcpStream>>;
    type Error = io::Error;
    type Future = BoxFuture<Self::Response, io::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let Self { address, progress } = self.clone();
        Box::pin(async move {
            let stream = TcpStream::connect(&address).await?;
            stream.set_nodelay(true)?;
            Ok(TokioIo::new(progress.count(stream)))
        })
    }
}
