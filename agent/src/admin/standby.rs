//! Owner and standby of a node: what each shows of the other.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    time::Duration,
};

use dns_policy::wall_time;
use serde::{Deserialize, Serialize};

use super::client::Client;
use crate::owner::{OwnerRecord, OwnerView};

/// Longest time for a standby's answer.
const WITHIN: Duration = Duration::from_millis(500);
/// Path on the owner's socket: how it came to own the node. The answer needs no other part of the agent.
pub(crate) const OWNER: &str = "/v1/owner";
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
    /// The owner, by its file; `None` if it is of a release that writes none, or the file is damaged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owned_by: Option<OwnerView>,
    /// Seconds since the owner last answered on its socket. One that is stopped does not answer.
    #[serde(default)]
    pub owner_silent_seconds: u64,
    /// The owner has died after others, and the takeover waits until this time, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub takes_over_at: Option<String>,
}

impl StandbyView {
    /// This process, which waits from now on.
    pub(crate) fn now(owner: Option<u32>) -> Self {
        Self {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            since: wall_time::render(wall_time::now()),
            owner,
            ..Self::default()
        }
    }

    /// The standby of the owner with this admin socket, if it answers.
    pub async fn beside(admin_socket: &Path) -> Option<Self> {
        let client = Client::new(&socket(admin_socket));
        let answer = tokio::time::timeout(WITHIN, client.get(PATH)).await;
        answer.ok()?.ok()
    }
}

/// Who owned the node before this agent, and who does next. Clones share the record.
#[derive(Clone, Debug)]
pub struct Succession {
    pub(crate) record: OwnerRecord,
    /// The owner's admin socket.
    socket: PathBuf,
    /// An agent should stand by all the time.
    is_expected: bool,
}

impl Succession {
    /// `socket` is the owner's admin socket.
    pub fn new(record: OwnerRecord, socket: &Path, is_expected: bool) -> Self {
        Self {
            record,
            socket: socket.to_owned(),
            is_expected,
        }
    }

    /// The agent that stands by, if one answers.
    pub(crate) async fn standby(&self) -> Option<StandbyView> {
        StandbyView::beside(&self.socket).await
    }

    /// Whether no agent stands by although one should; `None` = none has to.
    pub(crate) async fn is_missing(&self) -> Option<bool> {
        if !self.is_expected {
            return None;
        }
        Some(self.standby().await.is_none())
    }

    /// What is wrong if this agent stands by, or none.
    pub(crate) fn problem(&self, standby: Option<&StandbyView>) -> Option<String> {
        let is_missing = self.is_expected && standby.is_none();
        is_missing.then(|| {
            "no agent stands by beside this one, although --standby-expected says that one should: start the other one; \
             its log says why it ended"
                .to_owned()
        })
    }
}

/// The socket of the standby whose owner has this admin socket.
pub(crate) fn socket(admin_socket: &Path) -> PathBuf {
    let mut path = OsString::from(admin_socket);
    path.push(".standby");
    path.into()
}
