//! Owner and standby of a node: what each shows of the other.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    time::Duration,
};

use dns_policy::wall_time;
use hyper::StatusCode;
use serde::{Deserialize, Serialize, de::IgnoredAny};

use super::{
    client::{Client, ClientError},
    model::Done,
};
use crate::{
    owner::{OwnerRecord, OwnerView},
    refusal::Refusal,
};

/// Longest time for a standby's answer.
const WITHIN: Duration = Duration::from_millis(500);
/// Path on the owner's socket: how it came to own the node. The answer needs no other part of the agent.
pub(crate) const OWNER: &str = "/v1/owner";
/// Path on the owner's socket: it ends, so that its standby takes over.
pub(crate) const STEP_ASIDE: &str = "/v1/step-aside";
/// Path on the standby's socket: it reads the owner's files and maps as at a takeover.
pub(crate) const TRIAL: &str = "/v1/trial";
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

    /// Makes the standby of the owner with this admin socket take over, if it can read what the owner has written.
    ///
    /// # Errors
    /// None stands by, it could not take over well, or the owner does not answer. The owner goes on.
    pub async fn hand_over(admin_socket: &Path) -> Result<Self, ClientError> {
        let standby = Client::of_standby(&socket(admin_socket));
        let waiting: Self = standby.get(PATH).await?;
        let _ready: IgnoredAny = standby.post(TRIAL, &()).await?;
        let owner = Client::new(admin_socket);
        match owner.post::<Done>(STEP_ASIDE, &()).await {
            // An owner that ends may not send its answer any more.
            Ok(_) | Err(ClientError::Answer { .. }) => Ok(waiting),
            Err(error) => Err(error),
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

    /// Ends this agent as SIGTERM does, if another one takes its place.
    pub(super) async fn step_aside(&self) -> Result<Done, Refusal> {
        let Some(standby) = self.standby().await else {
            let text = "no agent stands by beside this one, so that it goes on; start another one with --standby";
            return Err(Refusal::new(StatusCode::CONFLICT, text));
        };
        tracing::info!(
            standby = standby.pid,
            version = standby.version,
            "this agent ends on request, and the agent that stands by takes over"
        );
        self.record.ask_to_end();
        Ok(Done {
            message: format!("this agent ends, and pid {} takes over", standby.pid),
            ..Done::default()
        })
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
