//! HTTP/1 on unix sockets that only root may connect to.

use std::{convert::Infallible, sync::Arc, time::Duration};

use http_body_util::Full;
use hyper::{
    Request, Response,
    body::{Bytes, Incoming},
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use tokio::{net::UnixListener, sync::Semaphore};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::grpc::peer::{Allowed, Checked};

/// Pause after a failed accept: the process may be out of descriptors.
const PAUSE: Duration = Duration::from_millis(10);
/// Connections at once; further ones wait to be accepted.
const CONNECTIONS: usize = 512;

/// Serves connections of `listener` until stopped; each on a task of `tasks`.
pub(crate) async fn serve<S, F>(
    listener: UnixListener,
    service: S,
    tasks: TaskTracker,
    stop: CancellationToken,
) where
    S: Fn(Request<Incoming>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<Full<Bytes>>> + Send + 'static,
{
    let allowed = Allowed { group: None };
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let accepted = async {
            let place = Arc::clone(&room).acquire_owned().await.ok();
            (place, listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            accepted = accepted => accepted,
            () = stop.cancelled() => return,
        };
        let stream = match accepted.and_then(|(stream, _)| Checked::new(stream, allowed)) {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!(%error, "connection refused");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        let (service, stop) = (service.clone(), stop.clone());
        tasks.spawn(async move {
            let service = service_fn(move |request| {
                let answer = service(request);
                async move { Ok::<_, Infallible>(answer.await) }
            });
            let served = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service);
            tokio::select! {
                served = served => {
                    if let Err(error) = served {
                        tracing::debug!(%error, "connection ended early");
                    }
                }
                () = stop.cancelled() => {}
            }
            drop(place);
        });
    }
}
