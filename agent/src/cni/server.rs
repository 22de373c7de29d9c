//! Requests to the socket of the CNI plugin.
//!
//! An ADD is answered once the pod is under policy: its labels are known, what a restart needs is on disk, and its
//! policy and its addresses are in force. Until then the container runtime does not start the pod.

use std::{
    collections::BTreeSet,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use daemon::http_server::{self, Admission, Socket};
use http_body_util::Full;
use hyper::{
    Request, Response, StatusCode,
    body::{Bytes, Incoming},
};
use serde_json::json;
use shared_maps::EndpointId;
use tokio::{net::UnixListener, sync::Semaphore, task::spawn_blocking};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    enforcement::{self, Enforcement, PodStanding, pause_after},
    failures::AddFailure,
    reports::PluginReports,
    request::{CniRequest, Valid},
};
use crate::{
    endpoint::source::{
        EndpointError,
        cni::{AttachError, Attachment, AttachmentId},
    },
    refusal::{self, Refusal},
};

/// Maximum bytes of a request. The longest one lists all attachments of a node.
const BODY: usize = 1 << 20;
/// The longest that an ADD waits.
const LONGEST: Duration = Duration::from_secs(20);
/// Maximum interfaces that are looked up at the same time.
const LOOKUPS: usize = 4;
/// Answers requests on the CNI plugin's socket.
#[derive(Clone)]
pub(crate) struct CniServer<E> {
    enforcement: E,
    lookups: Arc<Semaphore>,
    reports: PluginReports,
}

impl From<AttachError> for Refusal {
    fn from(error: AttachError) -> Self {
        match &error {
            AttachError::Starting | AttachError::Awaited(_) => Self::unavailable(error.to_string()),
            AttachError::Endpoint(EndpointError::File(_)) => Self::unavailable(format!(
                "the list with this pod cannot be written: {error}; free space there"
            )),
            AttachError::Endpoint(inner) if inner.is_passing() => {
                Self::unavailable(error.to_string())
            }
            _ => Self::new(StatusCode::UNPROCESSABLE_ENTITY, error.to_string()),
        }
    }
}

fn reason(error: &AttachError) -> AddFailure {
    match error {
        AttachError::Starting => AddFailure::Agent,
        AttachError::Awaited(_) => AddFailure::Policy,
        AttachError::Endpoint(EndpointError::File(_)) => AddFailure::Disk,
        _ => AddFailure::Interface,
    }
}

impl<E: Enforcement> CniServer<E> {
    /// Makes a server that passes pods to `enforcement`.
    pub(crate) fn new(enforcement: E, reports: PluginReports) -> Self {
        Self {
            enforcement,
            lookups: Arc::new(Semaphore::new(LOOKUPS)),
            reports,
        }
    }

    /// Accepts connections until `stop` is cancelled.
    pub(crate) async fn serve(
        self,
        listener: UnixListener,
        admission: Admission,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) {
        let service = move |request| {
            let server = self.clone();
            async move { server.answer(request).await }
        };
        http_server::serve(Socket::Unix(listener), admission, service, tasks, stop).await;
    }

    async fn answer(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        let endpoint = self.route(request).await;
        let body = |id: Option<EndpointId>| json!({"endpoint": id.map(|id| id.0)}).to_string();
        refusal::answer(endpoint.map(|id| body(id).into_bytes()))
    }

    /// Returns the number of the endpoint, if the enforcement has numbers.
    async fn route(&self, request: Request<Incoming>) -> Result<Option<EndpointId>, Refusal> {
        if request.uri().path() != "/v1/cni" {
            let reason = "this socket answers to /v1/cni only: is the plugin of the same release?";
            return Err(Refusal::bad_request(reason));
        }
        let body = refusal::body(request, BODY).await?;
        let request = serde_json::from_slice(&body).map_err(|error| {
            let reason = format!("the request cannot be read: {error}");
            Refusal::bad_request(format!("{reason}; is the plugin of the same release?"))
        })?;
        match request {
            CniRequest::Add {
                container_id,
                netns,
                ifname,
                namespace,
                pod,
                uid,
                addresses,
                wait_ms,
                fail_open_namespaces,
            } => {
                self.reports.note_fail_open(fail_open_namespaces);
                let attachment = Attachment {
                    id: id(&container_id, &ifname)?,
                    netns,
                    pod: format!("{namespace}/{pod}"),
                    uid,
                    addresses,
                };
                let wait = Duration::from_millis(wait_ms).min(LONGEST);
                self.add(attachment, wait).await
            }
            CniRequest::Delete {
                container_id,
                ifname,
                netns,
            } => {
                let id = id(&container_id, &ifname)?;
                self.end(id, netns).await.map(|()| None)
            }
            CniRequest::Check {
                container_id,
                ifname,
                netns,
            } => {
                let id = id(&container_id, &ifname)?;
                self.check(&self.enforcement.key_of(&id, netns.as_deref()))
                    .await
            }
            CniRequest::Collect { valid } => self.collect(valid).await.map(|()| None),
        }
    }

    async fn add(
        &self,
        attachment: Attachment,
        wait: Duration,
    ) -> Result<Option<EndpointId>, Refusal> {
        let begin = Instant::now();
        let deadline = begin + wait;
        let key = attachment.id.key();
        loop {
            let attached = self.attach(attachment.clone(), deadline).await;
            let attached =
                attached.inspect_err(|_| self.reports.failures.inc(AddFailure::Agent))?;
            match attached {
                // After the last look there is still time to answer with its reason.
                Err(error)
                    if error.is_awaited() && Instant::now() + pause_after(begin) * 2 < deadline =>
                {
                    tokio::time::sleep(pause_after(begin)).await;
                }
                Err(error) => {
                    tracing::warn!(pod = attachment.pod, %error, "the pod's interface is refused");
                    self.reports.failures.inc(reason(&error));
                    return Err(error.into());
                }
                Ok(()) => break,
            }
        }
        match enforcement::in_force(&self.enforcement, &key, deadline).await {
            Ok(endpoint) => {
                let took = begin.elapsed();
                tracing::info!(
                    endpoint = endpoint.map(|id| id.0),
                    pod = attachment.pod,
                    ?took,
                    "the pod is under policy and may start"
                );
                Ok(endpoint)
            }
            Err(refusal) => {
                tracing::warn!(
                    pod = attachment.pod,
                    reason = refusal.error,
                    "the pod is not under policy and does not start"
                );
                self.reports.failures.inc(AddFailure::Policy);
                // The runtime removes the pod as well, if it can.
                let _removed = self.remove(attachment.id).await;
                Err(refusal)
            }
        }
    }

    /// A look-up that hangs keeps its permit, but the runtime gets an answer.
    async fn attach(
        &self,
        attachment: Attachment,
        deadline: Instant,
    ) -> Result<Result<(), AttachError>, Refusal> {
        let netns = attachment.netns.clone();
        let attached = async {
            let turn = Arc::clone(&self.lookups).acquire_owned().await;
            let enforcement = self.enforcement.clone();
            let attached = spawn_blocking(move || {
                let _turn = turn;
                enforcement.attach(attachment)
            });
            let attached = attached.await;
            attached.map_err(|error| Refusal::unavailable(error.to_string()))
        };
        let attached = tokio::time::timeout_at(deadline.into(), attached).await;
        attached.unwrap_or_else(|_| {
            Err(Refusal::unavailable(format!(
                "the agent did not find the pod's interface in time: looking at {} hangs, or other pods' \
                 look-ups do; see the agent's log",
                netns.display()
            )))
        })
    }

    async fn check(&self, key: &str) -> Result<Option<EndpointId>, Refusal> {
        match self.enforcement.standing(key).await? {
            PodStanding::InForce(endpoint) => Ok(endpoint),
            PodStanding::Absent => Err(Refusal::not_found(format!(
                "there is no endpoint {key}: restart the pod"
            ))),
            PodStanding::Waiting(reason) | PodStanding::Incomplete(Some(reason)) => {
                Err(Refusal::unavailable(reason))
            }
            PodStanding::Incomplete(None) => Err(Refusal::unavailable("it is not in force yet")),
        }
    }

    async fn end(&self, id: AttachmentId, netns: Option<PathBuf>) -> Result<(), Refusal> {
        let Some(netns) = netns else {
            return self.remove(id).await;
        };
        let enforcement = self.enforcement.clone();
        self.change(move || enforcement.end(&id, &netns)).await
    }

    async fn remove(&self, id: AttachmentId) -> Result<(), Refusal> {
        let enforcement = self.enforcement.clone();
        self.change(move || enforcement.detach(&id)).await
    }

    async fn collect(&self, valid: Vec<Valid>) -> Result<(), Refusal> {
        let valid = valid.iter();
        let valid: Result<BTreeSet<_>, _> = valid
            .map(|valid| self::id(&valid.container_id, &valid.ifname))
            .collect();
        let valid = valid?;
        let enforcement = self.enforcement.clone();
        self.change(move || enforcement.detach_others(&valid)).await
    }

    /// Removes pods, and waits until the removal is carried out.
    async fn change(
        &self,
        change: impl FnOnce() -> Result<usize, EndpointError> + Send + 'static,
    ) -> Result<(), Refusal> {
        let changed = spawn_blocking(change).await;
        let changed = changed.map_err(|error| Refusal::unavailable(error.to_string()))?;
        let count = changed.map_err(|error| Refusal::unavailable(error.to_string()))?;
        if count > 0 {
            self.enforcement.settle().await?;
        }
        Ok(())
    }
}

fn id(container: &str, ifname: &str) -> Result<AttachmentId, Refusal> {
    AttachmentId::new(container, ifname).ok_or_else(|| {
        Refusal::bad_request(format!(
            "container {container:?} with interface {ifname:?} is no name of an attachment"
        ))
    })
}
