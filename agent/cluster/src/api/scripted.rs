//! For tests: a server that gives scripted answers.
#![allow(
    clippy::unwrap_used,
    reason = "code of tests, in a feature for those of other crates"
)]

use std::{
    collections::VecDeque,
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use hyper::{
    Request, Response,
    body::{Body, Bytes, Frame},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::json;
use tokio::net::TcpListener;
use tokio_util::task::TaskTracker;

use super::client::Api;
use crate::ApiSettings;

/// Added to the code of an answer that does not end.
pub const HELD: u16 = 1000;

/// Text, after which the body ends or not.
struct Text {
    rest: Option<Bytes>,
    is_held: bool,
}

impl Body for Text {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.rest.take() {
            Some(text) => Poll::Ready(Some(Ok(Frame::data(text)))),
            None if self.is_held => Poll::Pending,
            None => Poll::Ready(None),
        }
    }
}

/// A server whose answers the test writes down beforehand.
pub struct Server {
    pub api: Api,
    /// Method and path of each request.
    pub requests: Arc<Mutex<Vec<String>>>,
    pub answers: Arc<Mutex<VecDeque<(u16, String)>>>,
    _dir: tempfile::TempDir,
}

impl Server {
    /// After the last answer, the server refuses with 503.
    pub async fn start(answers: Vec<(u16, String)>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let requests: Arc<Mutex<Vec<String>>> = Arc::default();
        // The first request is the client's check.
        let first = (200, "{}".to_owned());
        let answers: VecDeque<_> = [first].into_iter().chain(answers).collect();
        let answers = Arc::new(Mutex::new(answers));
        let (log, script) = (Arc::clone(&requests), Arc::clone(&answers));
        let tasks = TaskTracker::new();
        let connections = tasks.clone();
        tasks.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (log, script) = (Arc::clone(&log), Arc::clone(&script));
                let service = service_fn(move |request: Request<_>| {
                    let _: &hyper::body::Incoming = request.body();
                    log.lock()
                        .push(format!("{} {}", request.method(), request.uri()));
                    let next = script.lock().pop_front();
                    let (code, body) = next.unwrap_or((503, "{}".to_owned()));
                    let mut response = Response::new(Text {
                        rest: Some(body.into()),
                        is_held: code > HELD,
                    });
                    *response.status_mut() = (code % HELD).try_into().unwrap();
                    async move { Ok::<_, Infallible>(response) }
                });
                connections
                    .spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
            }
        });
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kubeconfig");
        let text = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": format!("http://{address}")}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        });
        std::fs::write(&path, text.to_string()).unwrap();
        let settings = ApiSettings {
            kubeconfig: Some(path),
            server: None,
        };
        Self {
            api: Api::connect(&settings).await.unwrap(),
            requests,
            answers,
            _dir: dir,
        }
    }
}

/// A refusal of the server.
pub fn refusal(code: u16, message: &str) -> (u16, String) {
    (
        code,
        json!({"kind": "Status", "code": code, "message": message}).to_string(),
    )
}
