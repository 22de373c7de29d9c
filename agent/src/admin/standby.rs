//! What the owner's admin interface knows of the standby that waits on the same node.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    time::Duration,
};

use dns_policy::wall_time;
use serde::{Deserialize, Serialize};

use super::client::Client;

/// Longest time for a standby's answer.
const WITHIN: Duration = Duration::from_millis(500);
/// Path of the answer on the standby's socket.
pub(crate) const PATH: &str = "/v1/standby";

/// An agent that waits for the owner's end.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StandbyView {
    /// The standby's process id, in its own PID namespace.
    pub pid: u32,
    /// Version of the waiting program.
    pub version: String,
    /// When the standby began to wait, RFC 3339.
    pub since: String,
    /// Process id of the agent that owned the node at that time, as the standby sees it; `None` if it cannot see the
    /// process.
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

    /// The standby of the owner with this admin socket, if it answers.
    pub(crate) async fn beside(admin_socket: &Path) -> Option<Self> {
        let client = Client::new(&socket(admin_socket));
        let answer = tokio::time::timeout(WITHIN, client.get(PATH)).await;
        answer.ok()?.ok()
    }
}

/// The socket of the standby whose owner has this admin socket.
pub(crate) fn socket(admin_socket: &Path) -> PathBuf {
    let mut path = OsString::from(admin_socket);
    path.push(".standby");
    path.into()
}
