//! What puts the pods of the CNI plugin under policy: the programs of `run`, or the table of `netpol run`.

use std::{
    collections::BTreeSet,
    path::Path,
    time::{Duration, Instant},
};

use agent_core::core::view::standing::Standing;
use shared_maps::EndpointId;

use crate::{
    endpoint::source::{
        EndpointError,
        cni::{AttachError, Attachment, AttachmentId},
    },
    refusal::Refusal,
    runner::CoreAway,
};

/// The shortest and the longest pause between two looks at an endpoint.
const SHORTEST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
/// The time waited so far, divided by this, is the next pause: an ADD waits hardly longer than it has to.
const PART: u32 = 8;

/// Puts the pods of the plugin's requests under policy.
pub(crate) trait Enforcement: Clone + Send + Sync + 'static {
    /// Begins to put a pod's interface under policy. It is on disk when this returns. May block.
    ///
    /// # Errors The interface cannot be put under policy, or not yet.
    fn attach(&self, attachment: Attachment) -> Result<(), AttachError>;

    /// Key of an attachment.
    fn key_of(&self, id: &AttachmentId, netns: Option<&Path>) -> String;

    /// How far the attachment with this key is under policy.
    fn standing(&self, key: &str) -> impl Future<Output = Result<PodStanding, CoreAway>> + Send;

    /// Removes an attachment. Returns how many were there. May block.
    ///
    /// # Errors
    /// The list of pods could not be written.
    fn detach(&self, id: &AttachmentId) -> Result<usize, EndpointError>;

    /// Like [`Self::detach`], when the runtime itself removes the attachment, whose namespace is `netns`.
    ///
    /// # Errors
    /// The list of pods could not be written.
    fn end(&self, id: &AttachmentId, netns: &Path) -> Result<usize, EndpointError>;

    /// Removes the attachments that are not in `valid`. Returns their number. May block.
    ///
    /// # Errors
    /// The list of pods could not be written.
    fn detach_others(&self, valid: &BTreeSet<AttachmentId>) -> Result<usize, EndpointError>;

    /// Waits until removed attachments are out of force.
    fn settle(&self) -> impl Future<Output = Result<(), CoreAway>> + Send;
}

/// How far a pod is on its way under policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PodStanding {
    /// The pod is not known.
    Absent,
    /// The pod cannot be put under policy now; with the reason.
    Waiting(String),
    /// A part of its policy is not in force; with the reason, if a step failed.
    Incomplete(Option<String>),
    /// All of its policy is in force; with the number of its endpoint, if it has one.
    InForce(Option<EndpointId>),
}

impl From<Standing> for PodStanding {
    fn from(standing: Standing) -> Self {
        match standing {
            Standing::Absent => Self::Absent,
            Standing::Waiting(reason) => Self::Waiting(reason),
            Standing::Incomplete(reason) => Self::Incomplete(reason),
            Standing::InForce(endpoint) => Self::InForce(Some(endpoint)),
        }
    }
}

/// Waits until a pod is under policy.
pub(crate) async fn in_force<E: Enforcement>(
    enforcement: &E,
    key: &str,
    deadline: Instant,
) -> Result<Option<EndpointId>, Refusal> {
    let begin = Instant::now();
    loop {
        let reason = match enforcement.standing(key).await {
            Ok(PodStanding::InForce(endpoint)) => return Ok(endpoint),
            Ok(PodStanding::Waiting(reason) | PodStanding::Incomplete(Some(reason))) => reason,
            Ok(PodStanding::Incomplete(None)) => {
                "the agent has not received all policies and endpoints yet, see `status`".to_owned()
            }
            Ok(PodStanding::Absent) => "its interface was removed meanwhile".to_owned(),
            // Many pods that start at the same time keep the core busy.
            Err(slow @ CoreAway::Slow) => slow.to_string(),
            Err(away) => return Err(away.into()),
        };
        let pause = pause_after(begin);
        if Instant::now() + pause > deadline {
            return Err(Refusal::unavailable(format!(
                "the pod is not under policy: {reason}"
            )));
        }
        tokio::time::sleep(pause).await;
    }
}

/// How long to wait before the next look, after waiting since `begin`.
pub(super) fn pause_after(begin: Instant) -> Duration {
    (begin.elapsed() / PART).clamp(SHORTEST_PAUSE, LONGEST_PAUSE)
}
