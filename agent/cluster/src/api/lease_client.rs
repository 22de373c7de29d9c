//! Takes, renews and releases a Lease at the API server.

use std::time::Instant;

use hyper::Method;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::{
    client::{Api, RequestError},
    lease::{Sight, Step, Terms, released},
};

/// A Lease, and who takes it.
#[derive(Clone, Debug)]
pub struct LeaseClient {
    pub api: Api,
    pub namespace: String,
    /// Name of the holder: it differs between the agents of a cluster.
    pub holder: String,
    pub terms: Terms,
}

impl LeaseClient {
    /// Takes or renews the Lease if it is free or ours at `now`. Gives whether it is ours.
    pub async fn take(&self, sight: &mut Sight, now: Instant) -> Result<bool, RequestError> {
        let path = self.path();
        let lease = present(self.api.json(Method::GET, &path, None).await)?;
        let step = sight.step(
            &self.terms,
            lease.as_ref(),
            &self.holder,
            now,
            &micro_time(),
        );
        let written = match step {
            Step::Create(lease) => {
                let leases = self.leases();
                self.api.json(Method::POST, &leases, Some(&lease)).await
            }
            Step::Update(lease) => self.api.json(Method::PUT, &path, Some(&lease)).await,
            Step::Wait => return Ok(false),
        };
        match written {
            Ok(_) => Ok(true),
            // Another agent was faster.
            Err(error) if error.code() == Some(409) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Writes an annotation of the Lease, if it is ours. Gives whether it was written.
    pub async fn annotate(&self, key: &str, text: &str) -> Result<bool, RequestError> {
        let path = self.path();
        let lease = present(self.api.json(Method::GET, &path, None).await)?;
        let is_ours = |lease: &Value| lease["spec"]["holderIdentity"] == *self.holder;
        let Some(mut lease) = lease.filter(is_ours) else {
            return Ok(false);
        };
        let annotations = &mut lease["metadata"]["annotations"];
        if !annotations.is_object() {
            *annotations = json!({});
        }
        annotations[key] = json!(text);
        match self.api.json(Method::PUT, &path, Some(&lease)).await {
            Ok(_) => Ok(true),
            Err(error) if error.code() == Some(409) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Gives the Lease back. If that fails, others take it after its duration.
    pub async fn release(&self) {
        let path = self.path();
        let lease = self.api.json(Method::GET, &path, None).await;
        let released = lease.ok().and_then(|lease| released(&lease, &self.holder));
        if let Some(released) = released
            && let Err(error) = self.api.json(Method::PUT, &path, Some(&released)).await
        {
            tracing::debug!(%error, lease = self.terms.name, "Lease not released; it ends by itself");
        }
    }

    fn path(&self) -> String {
        format!("{}/{}", self.leases(), self.terms.name)
    }

    fn leases(&self) -> String {
        let namespace = &self.namespace;
        format!("/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases")
    }
}

/// The answer; `None` if the server does not have the object.
pub fn present(answer: Result<Value, RequestError>) -> Result<Option<Value>, RequestError> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if error.code() == Some(404) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The present time in the format of Leases and Events.
pub(super) fn micro_time() -> String {
    Timestamp::now().strftime("%FT%T.%6fZ").to_string()
}
