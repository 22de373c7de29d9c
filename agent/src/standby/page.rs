//! What a standby answers: its own socket beside the owner's admin socket says what waits, since when, and who the
//! owner is; its metrics address says that it is alive, and has the metrics of takeovers.
//!
//! An agent in the place of another one, on the same network, often has the same metrics address. Then the owner has it,
//! and the standby gets it with the takeover.

use std::{path::PathBuf, sync::Arc};

use anyhow::{Context as _, Result};
use daemon::{
    descriptors::Descriptors,
    http_server::{self, JSON, OPENMETRICS, Socket, TEXT, answer},
};
use http_body_util::Full;
use hyper::{
    Request, Response, StatusCode,
    body::{Bytes, Incoming},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{trial::Trial, watched::Watched};
use crate::{
    admin::standby::{PATH, TRIAL, socket},
    config::Config,
    grpc::peer,
    listener::{Listener, Listeners},
    refusal::{self, Refusal},
};

/// Serves until it is closed.
pub(super) struct Page {
    path: PathBuf,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Page {
    /// Binds the socket, and the metrics address if it is free.
    pub(super) async fn serve(config: &Config, watched: &Watched, trial: Trial) -> Result<Self> {
        let path = socket(&config.flags.admin_socket);
        let listener = peer::bind(&path, None).context("the socket of the standby")?;
        let limits = Listeners::new(Descriptors::raise().limit());
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        let trial = Arc::new(trial);
        let (of_page, of_metrics) = (watched.clone(), watched.clone());
        let serving = http_server::serve(
            Socket::Unix(listener),
            limits.admission(Listener::Admin),
            move |request: Request<Incoming>| {
                let (watched, trial) = (of_page.clone(), Arc::clone(&trial));
                async move { of_socket(request.uri().path(), &watched, trial).await }
            },
            tasks.clone(),
            stop.clone(),
        );
        tasks.spawn(serving);
        match http_server::bind_metrics(&config.metrics_address).await {
            Ok(Some(listener)) => {
                let serving = http_server::serve(
                    Socket::Tcp(listener),
                    limits.admission(Listener::Metrics),
                    move |request: Request<Incoming>| {
                        let answer = of_health(request.uri().path(), &of_metrics);
                        async move { answer }
                    },
                    tasks.clone(),
                    stop.clone(),
                );
                tasks.spawn(serving);
            }
            Ok(None) => {}
            Err(error) => {
                tracing::info!(%error, "the metrics address is not this standby's until it takes over");
            }
        }
        let asking = watched.clone().ask();
        let until = stop.clone();
        tasks.spawn(async move {
            until.run_until_cancelled(asking).await;
        });
        Ok(Self { path, stop, tasks })
    }

    /// Frees the socket and the address.
    pub(super) async fn close(self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.stop.cancel();
        let _absent = std::fs::remove_file(&self.path);
    }
}

async fn of_socket(path: &str, watched: &Watched, trial: Arc<Trial>) -> Response<Full<Bytes>> {
    match path {
        TRIAL => {
            let tried = tokio::task::spawn_blocking(move || trial.run()).await;
            let tried = tried.map_err(|error| Refusal::internal(&error));
            let refused = |reason| Refusal::new(StatusCode::CONFLICT, reason);
            let tried = tried.and_then(|tried| tried.map_err(refused));
            refusal::answer(tried.map(|()| b"{}".to_vec()))
        }
        PATH => match serde_json::to_vec(&watched.view()) {
            Ok(view) => answer(StatusCode::OK, JSON, view),
            Err(error) => not_written(&error.to_string()),
        },
        _ => not_known(path),
    }
}

fn of_health(path: &str, watched: &Watched) -> Response<Full<Bytes>> {
    match path {
        "/healthz" | "/readyz" => answer(StatusCode::OK, TEXT, "this agent stands by\n"),
        "/metrics" => match watched.scrape().text() {
            Ok(text) => answer(StatusCode::OK, OPENMETRICS, text),
            Err(error) => not_written(&error.to_string()),
        },
        _ => not_known(path),
    }
}

fn not_written(error: &str) -> Response<Full<Bytes>> {
    let text = format!("the answer cannot be written: {error}\n");
    answer(StatusCode::INTERNAL_SERVER_ERROR, TEXT, text)
}

fn not_known(path: &str) -> Response<Full<Bytes>> {
    let text = format!("{path} is not known: this agent is the standby of another one\n");
    answer(StatusCode::NOT_FOUND, TEXT, text)
}
