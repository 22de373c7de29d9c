//! The standby's own socket, beside the owner's admin socket: what waits, and since when.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use daemon::{
    descriptors::Descriptors,
    http_server::{self, JSON, Socket, answer},
};
use hyper::{Request, StatusCode, body::Incoming};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

use crate::{
    admin::standby::{PATH, StandbyView, socket},
    grpc::peer,
    listener::{Listener, Listeners},
};

/// Serves until dropped.
pub(crate) struct Page {
    path: PathBuf,
    _stop: DropGuard,
}

impl Page {
    /// Binds the socket.
    pub(crate) fn serve(admin_socket: &Path, view: &StandbyView) -> Result<Self> {
        let path = socket(admin_socket);
        let listener = peer::bind(&path, None).context("the socket of the standby")?;
        let body = serde_json::to_vec(view)?;
        let service = move |request: Request<Incoming>| {
            let body = body.clone();
            async move {
                match request.uri().path() {
                    PATH => answer(StatusCode::OK, JSON, body),
                    path => answer(
                        StatusCode::NOT_FOUND,
                        http_server::TEXT,
                        format!("{path} is not known: this agent is the standby of another one\n"),
                    ),
                }
            }
        };
        let stop = CancellationToken::new();
        let admission = Listeners::new(Descriptors::raise().limit()).admission(Listener::Admin);
        let tasks = TaskTracker::new();
        let serving = http_server::serve(
            Socket::Unix(listener),
            admission,
            service,
            tasks.clone(),
            stop.clone(),
        );
        tasks.spawn(serving);
        Ok(Self {
            path,
            _stop: stop.drop_guard(),
        })
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        let _absent = std::fs::remove_file(&self.path);
    }
}
