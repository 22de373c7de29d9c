//! The state of the watches: which of them are stale, and since when.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::resource::Resource;

/// A node may be without an agent for this long, while the pod of its agent is replaced.
const UNATTENDED_AFTER: Duration = Duration::from_secs(30);

/// The state of all watches. The watches, `status` and the metrics share it.
#[derive(Clone, Debug, Default)]
pub struct ClusterHealth {
    server: Arc<str>,
    /// The watched kinds.
    resources: &'static [Resource],
    /// `host:port` of the relays that replace the server's watches; empty = there are none.
    relays: Arc<[String]>,
    /// The relay that the objects come from.
    relay: Arc<Mutex<Option<String>>>,
    /// Why the files of the certificates for relays cannot be used.
    relay_certificates: Arc<Mutex<Option<String>>>,
    watches: Arc<Vec<Mutex<State>>>,
    own_node: Arc<Mutex<Option<String>>>,
    /// Why labels of this Node are not copied, or their changes not followed.
    node_labels: Arc<Mutex<Option<String>>>,
    /// Why the startup taint of this node cannot be removed.
    startup_taint: Arc<Mutex<Option<String>>>,
    /// Nodes without an agent, and since when.
    unattended: Arc<Mutex<BTreeMap<String, Instant>>>,
    /// Why refused objects are not reported in the cluster.
    report_problem: Arc<Mutex<Option<String>>>,
    /// Why the agent does not use the stored list of the cluster's objects in place of a watch that
    /// has not listed yet.
    stored_problem: Arc<Mutex<Option<String>>>,
}

#[derive(Clone, Debug)]
struct State {
    has_listed: bool,
    objects: usize,
    /// Why the watch is stale, and since when.
    stale: Option<(Instant, String)>,
    /// When the stored list, which is used in place of this watch, was last known to be right; `None` = no
    /// stored list is used for it.
    stored: Option<Instant>,
    /// Whether the stored list has objects of the kind.
    has_stored: bool,
}

/// The cluster as a source of objects.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct ClusterView {
    /// URL of the API server.
    pub server: String,
    /// `host:port` of the relays that the agent connects to; empty = it watches the API server.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub relays: Vec<String>,
    /// The relay that the objects come from; `None` = the API server, or no relay is connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relay: Option<String>,
    /// Why the files of the certificates for relays cannot be used. The files as last read are
    /// in use. `None` = the files can be used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relay_certificates: Option<String>,
    /// One entry for each watched kind.
    pub watches: Vec<WatchHealth>,
    /// Why the object about this node cannot be written; `None` = it is written.
    pub own_node: Option<String>,
    /// Why labels of this Node are not copied at once to the object about it; `None` = they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_labels: Option<String>,
    /// Why the startup taint of this node cannot be removed; `None` = it is not there, or the agent
    /// is not ready yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub startup_taint: Option<String>,
    /// Nodes that had an agent and have no agent now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes_without_agent: Vec<NodeWithoutAgent>,
    /// Why refused objects are not reported in the cluster; `None` = they are, or no object is refused.
    pub report_problem: Option<String>,
    /// Why the agent does not use the stored list of the cluster; `None` = it uses the list, or no
    /// list is stored.
    pub stored_problem: Option<String>,
}

/// A node that enforces policy, although no agent runs there.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct NodeWithoutAgent {
    pub node: String,
    /// For how many seconds this agent has seen no agent there.
    pub seconds: u64,
}

/// The present state of a watch.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct WatchHealth {
    pub kind: String,
    /// It has been listed at least once.
    pub has_listed: bool,
    pub objects: usize,
    /// For how many seconds it has been stale; 0 = it is not stale.
    pub stale_seconds: u64,
    /// Why the watch is stale; `None` = it is not stale.
    pub reason: Option<String>,
    /// Age of the stored list that is used until the watch has listed: seconds since it was last
    /// known to be right. `None` = the watch has listed, or there is no stored list.
    pub stored_seconds: Option<u64>,
}

impl ClusterHealth {
    /// The same state, with relays that replace the server's watches.
    pub(crate) fn through(self, relays: &[String]) -> Self {
        Self {
            relays: relays.into(),
            ..self
        }
    }

    /// The state before the watches of these kinds have begun.
    pub(crate) fn new(server: &str, resources: &'static [Resource]) -> Self {
        let begin = Instant::now();
        let state = State {
            has_listed: false,
            objects: 0,
            stale: Some((begin, "not listed yet".to_owned())),
            stored: None,
            has_stored: false,
        };
        let watches = resources.iter().map(|_| Mutex::new(state.clone()));
        Self {
            server: server.into(),
            resources,
            watches: Arc::new(watches.collect()),
            ..Self::default()
        }
    }

    /// The watched kinds.
    pub fn kinds(&self) -> impl Iterator<Item = &'static str> + use<> {
        self.resources.iter().map(|resource| resource.kind)
    }

    fn with(&self, kind: &str, change: impl FnOnce(&mut State)) {
        let of = self.resources.iter().position(|one| one.kind == kind);
        if let Some(state) = of.and_then(|of| self.watches.get(of)) {
            change(&mut state.lock());
        }
    }

    /// Notes that the watch follows the server.
    pub(crate) fn set_fresh(&self, resource: &Resource) {
        self.with(resource.kind, |state| {
            if let Some((since, _)) = state.stale.take() {
                let seconds = since.elapsed().as_secs();
                tracing::info!(
                    kind = resource.kind,
                    seconds,
                    "the watch follows the API server"
                );
            }
        });
    }

    /// Notes that the cluster does not have the kind, which is no fault: it counts as a kind
    /// without objects.
    pub(crate) fn set_absent(&self, resource: &Resource) {
        self.with(resource.kind, |state| {
            // Before the first list, an API server that has just started may not serve the kind yet.
            if state.has_listed && state.stale.take().is_some() {
                tracing::info!(
                    kind = resource.kind,
                    "the cluster has no definition of the kind, so no objects of it"
                );
            }
        });
    }

    /// Whether there are objects of the kind, from the watch or from a stored list.
    pub(crate) fn has_objects(&self, resource: &Resource) -> bool {
        let mut has = false;
        self.with(resource.kind, |state| {
            has = state.objects > 0 || state.has_stored;
        });
        has
    }

    /// Notes why the watch does not follow the server.
    pub(crate) fn set_stale(&self, resource: &Resource, reason: String) {
        self.with(resource.kind, |state| {
            let since = state.stale.as_ref().map(|(since, _)| *since);
            let known = state
                .stale
                .as_ref()
                .is_some_and(|(_, known)| *known == reason);
            if !known {
                tracing::warn!(
                    kind = resource.kind,
                    reason,
                    "the watch does not follow the API server; what it has stays in force"
                );
            }
            state.stale = Some((since.unwrap_or_else(Instant::now), reason));
        });
    }

    /// Like [`Self::set_stale`], for a kind that a relay has been unable to follow for this long.
    pub(crate) fn set_stale_for(
        &self,
        resource: &Resource,
        age: std::time::Duration,
        reason: String,
    ) {
        self.set_stale(resource, reason);
        self.with(resource.kind, |state| {
            if let Some((since, _)) = &mut state.stale
                && let Some(then) = Instant::now().checked_sub(age)
            {
                *since = then.min(*since);
            }
        });
    }

    /// Notes the relay that the objects come from. Gives whether they came from a relay before.
    pub(crate) fn set_relay(&self, relay: Option<String>) -> bool {
        let mut known = self.relay.lock();
        let had = known.is_some();
        if *known != relay {
            match &relay {
                Some(relay) => tracing::info!(relay, "the relay sends the objects of the cluster"),
                None => tracing::warn!("no relay is connected; the agent tries again"),
            }
            *known = relay;
        }
        had
    }

    /// Notes why the files of the certificates for relays cannot be used; `None` = they can.
    pub(crate) fn set_relay_certificates(&self, problem: Option<String>) {
        let mut known = self.relay_certificates.lock();
        if *known != problem {
            match &problem {
                Some(reason) => tracing::warn!(
                    reason,
                    "the files of the certificates for relays cannot be used; those that were read \
                     last are in use"
                ),
                None => {
                    tracing::info!("the files of the certificates for relays can be used again")
                }
            }
            *known = problem;
        }
    }

    /// Marks a kind as completely listed by the API server: a stored list is no longer used for it.
    pub(crate) fn set_listed(&self, resource: &Resource) {
        self.with(resource.kind, |state| {
            state.has_listed = true;
            state.stored = None;
            state.has_stored = false;
        });
    }

    /// Notes that a stored list of this age is used for these kinds, each with its number of objects.
    pub fn set_stored(&self, kinds: &[(&str, usize)], age: Duration) {
        let now = Instant::now();
        for (kind, objects) in kinds {
            self.with(kind, |state| {
                if !state.has_listed {
                    state.stored = Some(now.checked_sub(age).unwrap_or(now));
                    state.has_stored = *objects > 0;
                }
            });
        }
    }

    /// Notes why the stored list is not used.
    pub fn set_stored_problem(&self, problem: String) {
        *self.stored_problem.lock() = Some(problem);
    }

    /// Why the stored list is not used; `None` once every watch has listed.
    fn stored_problem(&self) -> Option<String> {
        let mut watches = self.watches.iter();
        let is_over = watches.all(|state| state.lock().has_listed);
        self.stored_problem.lock().clone().filter(|_| !is_over)
    }

    /// Whether every watch follows the server.
    pub(crate) fn is_fresh(&self) -> bool {
        let mut watches = self.watches.iter();
        watches.all(|state| state.lock().stale.is_none())
    }

    /// Whether all objects have been read once: by the watch, or from a stored list that has some.
    pub(crate) fn has_list(&self, resource: &Resource) -> bool {
        let mut has = false;
        self.with(resource.kind, |state| {
            has = state.has_listed || state.has_stored;
        });
        has
    }

    /// Notes why the object about this node cannot be written; `None` = it was written.
    pub(crate) fn set_own_node(&self, problem: Option<String>) {
        let mut known = self.own_node.lock();
        if *known != problem {
            match &problem {
                Some(reason) => tracing::warn!(
                    reason,
                    "the CiliumNode of this node cannot be written; the agent tries again"
                ),
                None => tracing::info!("the CiliumNode of this node is written"),
            }
            *known = problem;
        }
    }

    /// Notes why labels of this Node are not copied to the object about it at once; `None` = they are.
    pub(crate) fn set_node_labels(&self, problem: Option<String>) {
        let mut known = self.node_labels.lock();
        if *known != problem {
            if let Some(reason) = &problem {
                tracing::warn!(
                    reason,
                    "labels of this Node are not copied to its CiliumNode at once; the agent tries again"
                );
            }
            *known = problem;
        }
    }

    /// Notes why the startup taint of this node cannot be removed; `None` = it is not there.
    pub(crate) fn set_startup_taint(&self, problem: Option<String>) {
        let mut known = self.startup_taint.lock();
        if *known != problem {
            if let Some(reason) = &problem {
                tracing::warn!(
                    reason,
                    "the startup taint of this node cannot be removed; the agent tries again"
                );
            }
            *known = problem;
        }
    }

    /// Takes the nodes that had an agent and have no agent now.
    pub fn set_unattended(&self, nodes: BTreeSet<String>) {
        let now = Instant::now();
        let mut known = self.unattended.lock();
        let before = std::mem::take(&mut *known);
        *known = nodes
            .into_iter()
            .map(|node| {
                let since = before.get(&node).copied().unwrap_or(now);
                (node, since)
            })
            .collect();
    }

    /// Nodes that had an agent and have had none for a while.
    pub fn nodes_without_agent(&self) -> Vec<NodeWithoutAgent> {
        let nodes = self.unattended.lock();
        let nodes = nodes
            .iter()
            .filter(|(_, since)| since.elapsed() >= UNATTENDED_AFTER);
        let nodes = nodes.map(|(node, since)| NodeWithoutAgent {
            node: node.clone(),
            seconds: since.elapsed().as_secs(),
        });
        nodes.collect()
    }

    /// Notes how many objects of a kind there are.
    pub fn set_objects(&self, kind: &str, objects: usize) {
        self.with(kind, |state| state.objects = objects);
    }

    /// The server with every watch.
    pub fn view(&self) -> ClusterView {
        ClusterView {
            server: self.server.to_string(),
            relays: self.relays.to_vec(),
            relay: self.relay.lock().clone(),
            relay_certificates: self.relay_certificates.lock().clone(),
            watches: self.watches(),
            own_node: self.own_node.lock().clone(),
            node_labels: self.node_labels.lock().clone(),
            startup_taint: self.startup_taint.lock().clone(),
            nodes_without_agent: self.nodes_without_agent(),
            report_problem: self.report_problem.lock().clone(),
            stored_problem: self.stored_problem(),
        }
    }

    /// Why refused objects are not reported in the cluster.
    pub(crate) fn set_report_problem(&self, problem: Option<String>) {
        *self.report_problem.lock() = problem;
    }

    pub fn watches(&self) -> Vec<WatchHealth> {
        let all = self.resources.iter().zip(self.watches.iter());
        all.map(|(resource, state)| {
            let state = state.lock();
            let stale = state.stale.as_ref();
            WatchHealth {
                kind: resource.kind.to_owned(),
                has_listed: state.has_listed,
                objects: state.objects,
                stale_seconds: stale.map_or(0, |(since, _)| since.elapsed().as_secs().max(1)),
                reason: stale.map(|(_, reason)| reason.clone()),
                stored_seconds: state.stored.map(|then| then.elapsed().as_secs()),
            }
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resource::RESOURCES;

    fn resource(kind: &str) -> &'static Resource {
        RESOURCES.iter().find(|one| one.kind == kind).unwrap()
    }

    #[test]
    fn a_stored_list_stands_in_until_the_watch_has_listed() {
        let health = ClusterHealth::new("https://192.0.2.1:6443", RESOURCES);
        health.set_listed(resource("Namespace"));
        let kinds = [("Namespace", 1), ("Pod", 1), ("ServiceCIDR", 0)];
        let age = Duration::from_secs(1);
        health.set_stored(&kinds, age);
        let of = |kind: &str| {
            let mut watches = health.watches().into_iter();
            watches.find(|watch| watch.kind == kind).unwrap()
        };
        assert_eq!(of("Namespace").stored_seconds, None);
        assert!(of("Pod").stored_seconds >= Some(1));
        assert!(health.has_list(resource("Pod")) && !of("Pod").has_listed);
        // A stored list without objects does not count as read, so that a kind that the cluster
        // does not have can still be taken as empty.
        assert!(!health.has_list(resource("ServiceCIDR")));
        health.set_listed(resource("Pod"));
        assert_eq!(of("Pod").stored_seconds, None);
        // The watch listed first, so the stored list is not used in its place.
        health.set_stored(&[("Pod", 1)], age);
        assert_eq!(of("Pod").stored_seconds, None);
    }
}
