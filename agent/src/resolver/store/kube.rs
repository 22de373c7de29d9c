//! DNSNameResolver objects in the Kubernetes API.
//!
//! ```text
//!  watch, relay or stored list ─► task of documents ─► feed ─► watch() of every agent
//!  get, list, create, delete, update_status ◄─► API server        lead(): a Lease beside the objects
//! ```

mod lead;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use agent_cluster::api::{
    backoff::random,
    client::{Api, RequestError},
    lease::Terms,
    lease_client::{LeaseClient, present},
};
use dns_policy::name::Fqdn;
use hyper::Method;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::{
    Changes, Created, Observers, ResolverStore, Role, StoreError, StoreHealth, Updated, feed::Feed,
};
use crate::resolver::object::{API_VERSION, KIND, ObjectKey, Resolver, Status, Version};

/// Name of the Lease, in the namespace of the objects: agents that write the same objects have the
/// same Lease.
const LEASE: &str = "holdfast-resolver";
/// Objects in one page of a list, and maximum bytes of the page: an object has at most 1.5 MB.
const PAGE: u32 = 50;
const PAGE_MAX: usize = 96 << 20;
/// Attempts of one request, the first pause between them, and the longest time of all together. A leader stops
/// writing up to that long before another agent may lead.
const ATTEMPTS: u32 = 4;
const PAUSE: Duration = Duration::from_millis(200);
const LONGEST: Duration = Duration::from_secs(10);

/// Where the objects are, and who writes them.
#[derive(Clone, Debug)]
pub struct KubeSettings {
    pub namespace: String,
    /// Name of this node: the holder in the Lease.
    pub node: String,
    /// How long a leader that does not renew its Lease stays the leader.
    pub lease: Duration,
    /// Whether this agent writes at all.
    pub access: Access,
}

/// What an agent does with the objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It reads and writes them.
    Write,
    /// It reads them; another program writes them.
    Consume,
}

/// The objects of one namespace.
#[derive(Debug)]
pub struct KubeStore {
    api: Api,
    feed: Arc<Feed>,
    settings: KubeSettings,
    lease: LeaseClient,
    /// Present failures, by the kind of request.
    problems: watch::Sender<BTreeMap<What, String>>,
}

/// A request that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    Lease,
    Read,
    Create,
    Delete,
    Status,
}

impl What {
    /// A text for the failure, and the right that the request needs.
    fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::Lease => ("the Lease cannot be taken", "get, create and update leases"),
            Self::Read => ("objects cannot be read", "get and list dnsnameresolvers"),
            Self::Create => ("objects cannot be made", "create dnsnameresolvers"),
            Self::Delete => ("objects cannot be removed", "delete dnsnameresolvers"),
            Self::Status => (
                "the status of objects cannot be written",
                "patch dnsnameresolvers/status",
            ),
        }
    }
}

impl KubeStore {
    /// The store; `feed` brings the objects and their changes.
    pub fn new(api: Api, feed: Arc<Feed>, settings: KubeSettings) -> Self {
        let lease = LeaseClient {
            api: api.clone(),
            namespace: settings.namespace.clone(),
            holder: settings.node.clone(),
            terms: Terms {
                name: LEASE,
                duration: settings.lease,
            },
        };
        Self {
            api,
            feed,
            settings,
            lease,
            problems: watch::Sender::default(),
        }
    }

    fn objects(&self) -> String {
        let namespace = &self.settings.namespace;
        format!("/apis/{API_VERSION}/namespaces/{namespace}/dnsnameresolvers")
    }

    fn path(&self, key: &ObjectKey) -> String {
        format!("{}/{}", self.objects(), key.name)
    }

    /// Refuses requests that are only for agents that write.
    fn check_access(&self) -> Result<(), StoreError> {
        match self.settings.access {
            Access::Write => Ok(()),
            Access::Consume => Err(StoreError::Refused(
                "--resolver consume: another program writes the DNSNameResolvers".to_owned(),
            )),
        }
    }

    /// Sends a request, and again if the server cannot be reached or is busy, for [`LONGEST`] in all.
    async fn send(
        &self,
        method: &Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Value, RequestError> {
        let sent = tokio::time::timeout(LONGEST, self.send_often(method, path, body)).await;
        let late = || RequestError::Unreachable(format!("no answer within {LONGEST:?}"));
        sent.unwrap_or_else(|_| Err(late()))
    }

    async fn send_often(
        &self,
        method: &Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Value, RequestError> {
        let mut pause = PAUSE;
        let mut left = ATTEMPTS;
        loop {
            let sent = self.api.json_within(method.clone(), path, body, PAGE_MAX);
            let error = match sent.await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            left -= 1;
            if left == 0 || !is_temporary(&error) {
                return Err(error);
            }
            tokio::time::sleep(pause + random(pause)).await;
            pause *= 2;
        }
    }

    /// Records whether a request succeeded, for the store's health. Gives its error a text and a remedy.
    fn note<T>(&self, what: What, answer: Result<T, RequestError>) -> Result<T, StoreError> {
        let error = match answer {
            Ok(answer) => {
                self.set_problem(what, None);
                return Ok(answer);
            }
            Err(error) => error,
        };
        let problem = self.problem(what, &error);
        self.set_problem(what, Some(problem.clone()));
        Err(match is_temporary(&error) {
            true => StoreError::Unavailable(problem),
            false => StoreError::Refused(problem),
        })
    }

    fn problem(&self, what: What, error: &RequestError) -> String {
        let (failed, right) = what.words();
        let namespace = &self.settings.namespace;
        let remedy = match error.code() {
            Some(403) => format!(
                "let the agent's account {right} in the namespace {namespace}, as the chart's \
                 ClusterRole holdfast-resolver does (value resolver.mode kube)"
            ),
            Some(404) if what == What::Create => format!(
                "create the namespace {namespace} (--resolver-namespace), and install the CRDs (chart \
                 value crds.install)"
            ),
            Some(404) if what == What::Lease => {
                format!("create the namespace {namespace} (--resolver-namespace)")
            }
            _ => "the agent tries again".to_owned(),
        };
        format!("DNSNameResolvers in {namespace}: {failed}: {error}; {remedy}")
    }

    fn set_problem(&self, what: What, problem: Option<String>) {
        self.problems.send_if_modified(|problems| {
            let changed = problems.get(&what) != problem.as_ref();
            match problem {
                Some(problem) => {
                    if changed {
                        tracing::warn!(problem, "the resolver's store");
                    }
                    problems.insert(what, problem);
                }
                None => drop(problems.remove(&what)),
            }
            changed
        });
    }

    /// Reads an object that the server sent.
    fn read(&self, mut object: Value) -> Result<Resolver, StoreError> {
        if let Some(fields) = object.as_object_mut() {
            fields.insert("apiVersion".to_owned(), API_VERSION.into());
            fields.insert("kind".to_owned(), KIND.into());
        }
        let read = Resolver::read(&object, &self.settings.namespace);
        let read = read.map_err(|error| StoreError::Refused(error.to_string()))?;
        Ok(read.object)
    }
}

impl ResolverStore for KubeStore {
    fn observers(&self) -> Observers {
        match self.settings.access {
            Access::Write => Observers::Every,
            Access::Consume => Observers::Leader,
        }
    }

    async fn get(&self, key: &ObjectKey) -> Result<Option<Resolver>, StoreError> {
        let answer = self.send(&Method::GET, &self.path(key), None).await;
        let object = self.note(What::Read, present(answer))?;
        object.map(|object| self.read(object)).transpose()
    }

    async fn list(&self) -> Result<Vec<Resolver>, StoreError> {
        let mut all = Vec::new();
        let mut next = String::new();
        loop {
            let path = format!("{}?limit={PAGE}{next}", self.objects());
            let answer = self.send(&Method::GET, &path, None).await;
            let mut page = self.note(What::Read, answer)?;
            if let Some(items) = page.get_mut("items").and_then(Value::as_array_mut) {
                for item in items {
                    match self.read(item.take()) {
                        Ok(object) => all.push(object),
                        Err(error) => tracing::warn!(%error, "a DNSNameResolver is left out"),
                    }
                }
            }
            match page["metadata"]["continue"].as_str() {
                Some(token) if !token.is_empty() => next = format!("&continue={token}"),
                _ => return Ok(all),
            }
        }
    }

    async fn watch(
        &self,
        changes: mpsc::Sender<Changes>,
        health: watch::Sender<StoreHealth>,
        stop: CancellationToken,
    ) {
        let mut problems = self.problems.subscribe();
        problems.mark_changed();
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                next = self.feed.next() => if changes.send(next).await.is_err() {
                    return;
                },
                changed = problems.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    let problems = problems.borrow_and_update().values().cloned().collect();
                    health.send_replace(StoreHealth { problems });
                }
            }
        }
    }

    async fn lead(&self, role: watch::Sender<Role>, stop: CancellationToken) {
        match self.settings.access {
            Access::Write => self.seek_lease(&role, &stop).await,
            Access::Consume => stop.cancelled().await,
        }
    }

    async fn create(&self, key: &ObjectKey, name: &Fqdn) -> Result<Created, StoreError> {
        self.check_access()?;
        let object = json!({
            "apiVersion": API_VERSION, "kind": KIND,
            "metadata": {"namespace": key.namespace, "name": key.name},
            "spec": {"name": name.as_str()},
        });
        let path = self.objects();
        let answer = match self.send(&Method::POST, &path, Some(&object)).await {
            Err(error) if error.code() == Some(409) => Ok(None),
            answer => answer.map(Some),
        };
        match self.note(What::Create, answer)? {
            Some(object) => Ok(Created::Done(self.read(object)?)),
            None => Ok(Created::Exists),
        }
    }

    async fn delete(&self, key: &ObjectKey) -> Result<(), StoreError> {
        self.check_access()?;
        let answer = self.send(&Method::DELETE, &self.path(key), None).await;
        self.note(What::Delete, present(answer)).map(drop)
    }

    async fn update_status(
        &self,
        key: &ObjectKey,
        version: &Version,
        status: &Status,
    ) -> Result<Updated, StoreError> {
        self.check_access()?;
        if version.0.is_empty() {
            return Ok(Updated::Conflict);
        }
        let patch = json!({
            "metadata": {"resourceVersion": version.0}, "status": status.document(),
        });
        let path = format!("{}/status", self.path(key));
        let answer = match self.send(&Method::PATCH, &path, Some(&patch)).await {
            Err(error) if error.code() == Some(409) => Ok(Err(Updated::Conflict)),
            Err(error) if error.code() == Some(404) => Ok(Err(Updated::Gone)),
            answer => answer.map(Ok),
        };
        Ok(match self.note(What::Status, answer)? {
            Err(updated) => updated,
            Ok(object) => {
                let version = object["metadata"]["resourceVersion"].as_str();
                Updated::Done(Version(version.unwrap_or_default().to_owned()))
            }
        })
    }
}

/// Whether the same request may succeed later without any change.
fn is_temporary(error: &RequestError) -> bool {
    match error.code() {
        Some(code) => code == 429 || code >= 500,
        None => true,
    }
}

#[cfg(test)]
mod tests;
