//! Requests that read, create and delete CiliumIdentity objects. No request changes an object.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use agent_cluster::api::{
    client::{Api, RequestError},
    lease_client::present,
};
use agent_core::{
    identity::cluster_object::{HOLDFAST, MADE_BY, MANAGED_BY, is_ours},
    labels::LabelSet,
    policy::{document::Body, parse::parse_object},
};
use hyper::Method;
use serde_json::{Value, json};
use shared_maps::IdentityId;

const ALL: &str = "/apis/cilium.io/v2/ciliumidentities";
/// Annotation of an object whose labels no Pod document has: the node whose endpoint has them. The object stays while
/// the CiliumNode of this node exists.
const NODE: &str = "holdfast.io/node";
/// Maximum bytes of an object; the API server stores at most 1.5 MB.
const OBJECT_MAX: usize = 2 << 20;
/// Longest time until an answer arrives.
const ANSWER: Duration = Duration::from_secs(5);
/// Maximum attempts, if an object is added and removed between two requests.
const ATTEMPTS: usize = 3;

/// The place where objects are made, and its clock: tests have their own.
pub(super) trait Store: Send + Sync {
    fn now(&self) -> Instant {
        Instant::now()
    }
    fn sleep_until(&self, at: Instant) -> impl Future<Output = ()> + Send {
        tokio::time::sleep_until(at.into())
    }
    /// Namespace of the agents.
    fn namespace(&self) -> &str;
    /// Makes the object, or reads the existing one with its name.
    fn make(
        &self,
        id: IdentityId,
        labels: &LabelSet,
        is_of_pod: bool,
    ) -> impl Future<Output = Result<Made, RequestError>> + Send;
    /// A Lease; `None` if it does not exist, or may not be read.
    fn lease(
        &self,
        namespace: &str,
        name: &str,
    ) -> impl Future<Output = Result<Option<Value>, RequestError>> + Send;
}

/// The objects at the API server.
#[derive(Clone, Debug)]
pub(super) struct Objects {
    pub(super) api: Api,
    /// Name of this node.
    pub(super) node: String,
}

/// The result of an attempt to make an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Made {
    Created,
    /// It exists with the same labels.
    Found,
    /// Other labels have the number.
    Others,
}

/// The result of an attempt to delete an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Deleted {
    Done,
    /// The object changed, belongs to another program, or is still used by a node.
    Kept,
}

impl Store for Objects {
    fn namespace(&self) -> &str {
        self.api.namespace()
    }

    async fn make(
        &self,
        id: IdentityId,
        labels: &LabelSet,
        is_of_pod: bool,
    ) -> Result<Made, RequestError> {
        let object = self.object(id, labels, is_of_pod);
        let written = object["security-labels"]
            .as_object()
            .map_or(0, serde_json::Map::len);
        if written != labels.as_slice().len() {
            // An object cannot have one key with two values.
            return Ok(Made::Others);
        }
        for _ in 0..ATTEMPTS {
            match self.send(Method::POST, ALL, Some(&object)).await {
                Ok(stored) => {
                    return match labels_of(&stored) {
                        Some(stored) if stored != *labels => Err(changed(id)),
                        _ => Ok(Made::Created),
                    };
                }
                Err(error) if error.code() == Some(409) => {}
                Err(error) => return Err(error),
            }
            let found = present(self.send(Method::GET, &path(id), None).await)?;
            if let Some(found) = found {
                let is_same = labels_of(&found).is_some_and(|found| found == *labels);
                return Ok(if is_same { Made::Found } else { Made::Others });
            }
        }
        let reason = format!("{}: it is there and gone by turns", path(id));
        Err(RequestError::Unreachable(reason))
    }

    async fn lease(&self, namespace: &str, name: &str) -> Result<Option<Value>, RequestError> {
        let path = format!("/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}");
        match self.send(Method::GET, &path, None).await {
            Err(error) if error.code() == Some(403) => {
                tracing::debug!(%error, namespace, name, "the Lease may not be read");
                Ok(None)
            }
            answer => present(answer),
        }
    }
}

impl Objects {
    /// Deletes an object, if it did not change and no node uses it.
    pub(super) async fn delete(
        &self,
        id: IdentityId,
        labels: &LabelSet,
        uid: Option<&Arc<str>>,
    ) -> Result<Deleted, RequestError> {
        let Some(found) = present(self.send(Method::GET, &path(id), None).await)? else {
            return Ok(Deleted::Kept);
        };
        let metadata = &found["metadata"];
        let has_uid = uid.is_none_or(|uid| metadata["uid"] == **uid);
        let is_ours = is_ours(metadata["annotations"][MADE_BY].as_str());
        if !has_uid || !is_ours || labels_of(&found).is_none_or(|found| found != *labels) {
            return Ok(Deleted::Kept);
        }
        if let Some(node) = metadata["annotations"][NODE].as_str()
            && is_name(node)
        {
            let node = format!("/apis/cilium.io/v2/ciliumnodes/{node}");
            if present(self.send(Method::GET, &node, None).await)?.is_some() {
                return Ok(Deleted::Kept);
            }
        }
        let options = json!({
            "kind": "DeleteOptions", "apiVersion": "v1",
            "preconditions": {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]},
        });
        match self.send(Method::DELETE, &path(id), Some(&options)).await {
            Ok(_) => Ok(Deleted::Done),
            // It changed since it was read, or it is gone.
            Err(error) if matches!(error.code(), Some(404 | 409)) => Ok(Deleted::Kept),
            Err(error) => Err(error),
        }
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Value, RequestError> {
        let answer = self.api.json_within(method, path, body, OBJECT_MAX);
        let answer = tokio::time::timeout(ANSWER, answer).await;
        let late = || RequestError::Unreachable(format!("no answer within {ANSWER:?}"));
        answer.unwrap_or_else(|_| Err(late()))
    }

    fn object(&self, id: IdentityId, labels: &LabelSet, is_of_pod: bool) -> Value {
        let texts = labels
            .iter()
            .map(|label| (format!("{}:{}", label.source(), label.key()), label.value()));
        let mut metadata = json!({
            "name": id.0.to_string(), "labels": {MANAGED_BY: HOLDFAST}, "annotations": {MADE_BY: HOLDFAST},
        });
        if !is_of_pod {
            metadata["annotations"][NODE] = json!(self.node);
        }
        json!({
            "apiVersion": "cilium.io/v2", "kind": "CiliumIdentity", "metadata": metadata,
            "security-labels": texts.collect::<BTreeMap<_, _>>(),
        })
    }
}

/// The error for a number whose object has other labels than expected.
fn changed(id: IdentityId) -> RequestError {
    RequestError::Refused {
        code: 422,
        message: format!(
            "the API server stored CiliumIdentity {id} with other labels than the agent sent: find the \
             MutatingWebhookConfiguration or MutatingAdmissionPolicy that changes them"
        ),
    }
}

fn path(id: IdentityId) -> String {
    format!("{ALL}/{}", id.0)
}

/// Whether a text can be a part of a URL path. The agent did not write this text: it is from an object.
fn is_name(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.');
    !text.is_empty() && text.bytes().all(is_plain) && !text.starts_with('.')
}

fn labels_of(object: &Value) -> Option<LabelSet> {
    match parse_object(object, "cluster").ok()?.body {
        Body::Identity(identity) => Some(identity.labels),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
