//! Connections: TLS, HTTP/1.1, and their end when the server goes away.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use super::server::Shared;
use crate::listening::listen;
use crate::netns::Netns;

/// Binds in a namespace, or in the test's namespace.
pub(super) fn bind(netns: Option<&Netns>, at: SocketAddr) -> Result<std::net::TcpListener> {
    let bound = match netns {
        Some(netns) => netns.enter(|| listen(at))?,
        None => listen(at),
    };
    bound.with_context(|| format!("bind {at}"))
}

/// Accepts connections at the latest listener that the test has sent. While the server is away,
/// there is no listener.
pub(super) async fn serve(
    mut listeners: watch::Receiver<Option<Arc<std::net::TcpListener>>>,
    tls: TlsAcceptor,
    shared: Arc<Shared>,
    stop: CancellationToken,
) -> Result<()> {
    loop {
        let present = stop.child_token();
        let listener = listeners.borrow_and_update().clone();
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            changed = listeners.changed() => changed?,
            ended = accept(listener, &tls, &shared, &present) => ended?,
        }
        // Open connections end, too.
        present.cancel();
    }
}

async fn accept(
    listener: Option<Arc<std::net::TcpListener>>,
    tls: &TlsAcceptor,
    shared: &Arc<Shared>,
    present: &CancellationToken,
) -> Result<()> {
    let Some(listener) = listener else {
        return std::future::pending().await;
    };
    let listener = TcpListener::from_std(listener.try_clone()?)?;
    loop {
        let (stream, _) = listener.accept().await?;
        let connection = connection(stream, tls.clone(), shared.clone());
        let present = present.clone();
        shared.tasks.spawn(async move {
            tokio::select! {
                () = present.cancelled() => {}
                () = connection => {}
            }
        });
    }
}

async fn connection(stream: TcpStream, tls: TlsAcceptor, shared: Arc<Shared>) {
    let _ = stream.set_nodelay(true);
    // A client that does not accept the certificate fails here.
    let Ok(stream) = tls.accept(stream).await else {
        return;
    };
    let service = service_fn(move |request| {
        let shared = shared.clone();
        async move { Ok::<_, std::convert::Infallible>(shared.answer(request).await) }
    });
    let served = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
    // Errors are ignored: a client or a fault of the test broke the connection.
    let _ = served.await;
}
