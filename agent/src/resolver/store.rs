//! Stores of DNSNameResolver objects: what the resolver needs of a directory, or of Kubernetes.

#[cfg_attr(
    not(feature = "kubernetes"),
    allow(dead_code, reason = "what only the client uses")
)]
pub mod feed;
pub mod file;
#[cfg(feature = "kubernetes")]
pub mod kube;

use std::future::Future;

use agent_core::source_event::SourceEvent;
use dns_policy::name::Fqdn;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::object::{ObjectKey, Resolver, Status, Version};

/// Changes of objects, in the order in which they were made.
pub type Changes = Vec<SourceEvent<Resolver>>;

/// Objects of one namespace.
///
/// Every agent lists and watches them. Only the agent that leads creates and deletes them, looks names up, and
/// removes addresses. [`ResolverStore::observers`] says which agents add the answers that pods got.
pub trait ResolverStore: Send + Sync + 'static {
    fn observers(&self) -> Observers;

    /// Reads the object as it is in the store now, not as the watch last sent it.
    fn get(
        &self,
        key: &ObjectKey,
    ) -> impl Future<Output = Result<Option<Resolver>, StoreError>> + Send;

    /// Reads every object as it is in the store now.
    fn list(&self) -> impl Future<Output = Result<Vec<Resolver>, StoreError>> + Send;

    /// Sends the objects, then their changes, until `stop`: the first change is
    /// [`SourceEvent::Init`]. Errors are retried and reported in `health`.
    fn watch(
        &self,
        changes: mpsc::Sender<Changes>,
        health: watch::Sender<StoreHealth>,
        stop: CancellationToken,
    ) -> impl Future<Output = ()> + Send;

    /// Tries to become the agent that leads, until `stop`, and reports in `role` whether this agent leads. When the
    /// call returns, this agent does not lead, and another one may.
    fn lead(
        &self,
        role: watch::Sender<Role>,
        stop: CancellationToken,
    ) -> impl Future<Output = ()> + Send;

    /// Makes an object with an empty status.
    fn create(
        &self,
        key: &ObjectKey,
        name: &Fqdn,
    ) -> impl Future<Output = Result<Created, StoreError>> + Send;

    /// Removes an object. A missing object is no error.
    fn delete(&self, key: &ObjectKey) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Replaces the status of an object, if the object still has the version `version`.
    fn update_status(
        &self,
        key: &ObjectKey,
        version: &Version,
        status: &Status,
    ) -> impl Future<Output = Result<Updated, StoreError>> + Send;
}

/// Which agents write the answers that their pods got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Observers {
    /// Only the agent that leads.
    Leader,
    /// Every agent: the store compares versions. An agent that follows writes an observation only if it has an
    /// address that the object does not have. The leader renews known ones: if each node wrote for each TTL, the load
    /// would grow with the cluster.
    Every,
}

/// Whether this agent writes objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// Another agent leads, or no agent does.
    #[default]
    Follows,
    /// This agent looks names up, and creates, writes and deletes objects.
    Leads,
    /// This agent looks names up, and keeps the results in memory, because it cannot write objects. Other agents may
    /// do the same.
    LeadsInMemory,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Created {
    /// The object as it is in the store now.
    Done(Resolver),
    /// An object of this key is there already.
    Exists,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Updated {
    /// The status was written; the object has this version now.
    Done(Version),
    /// The object has another version: the caller has to read it again and decide again.
    Conflict,
    /// The object is not there.
    Gone,
}

/// Whether a store can be used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreHealth {
    /// What is wrong, each with its remedy.
    pub problems: Vec<String>,
}

/// Why a store did not carry out a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The store refuses: another attempt is useless until a setting or a right changes.
    #[error("{0}")]
    Refused(String),
    /// The store cannot carry out the request now.
    #[error("{0}")]
    Unavailable(String),
}
