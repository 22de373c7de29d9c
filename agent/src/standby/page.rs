//! The standby's own socket, beside the owner's admin socket: what waits, and since when.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result};
use daemon::{
    descriptors::Descriptors,
    http_server::{self, JSON, Socket, answer},
};
use dns_policy::wall_time;
use hyper::{Request, StatusCode, body::Incoming};
use serde::{Deserialize, Serialize};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

use crate::{
    admin::client::Client,
    grpc::peer,
    listener::{Listener, Listeners},
};

/// Longest time for a standby's answer.
const WITHIN: Duration = Duration::from_millis(500);
const PATH: &str = "/v1/standby";

/// An agent that waits for the owner's end.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StandbyView {
    /// Its process id, in its own PID namespace.
    pub pid: u32,
    /// Its release.
    pub version: String,
    /// Since when it waits, RFC 3339.
    pub since: String,
    /// Process id of the agent that owned the node then, as the standby sees it; none if it cannot see it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<u32>,
}

impl StandbyView {
    /// This process, which waits from now on.
    pub(crate) fn now(owner: Option<u32>) -> Self {
        Self {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            since: wall_time::render(wall_time::now()),
            owner,
        }
    }

    /// The standby beside the owner with this admin socket, if one answers.
    pub(crate) async fn beside(admin_socket: &Path) -> Option<Self> {
        let client = Client::new(&socket(admin_socket));
        let answer = tokio::time::timeout(WITHIN, client.get(PATH)).await;
        answer.ok()?.ok()
    }
}

/// The socket of the standby whose owner has this admin socket.
fn socket(admin_socket: &Path) -> PathBuf {
    let mut path = OsString::from(admin_socket);
    path.push(".standby");
    path.into()
}

/// Serves until dropped.
pub(crate) struct Page {
    path: PathBuf,
    _stop: DropGuard,
}

impl Page {
    /// Binds the socket.
    pub(crate) fn serve(admin_socket: &Path, view: StandbyView) -> Result<Self> {
        let path = socket(admin_socket);
        let listener = peer::bind(&path, None).context("the socket of the standby")?;
        let body = serde_json::to_vec(&view)?;
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
            tasks,
            stop.clone(),
        );
        tokio::spawn(serving);
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
