//! How the watches are: which of them is stale, and since when.

use std::{sync::Arc, time::Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::resource::{RESOURCES, Resource};

/// Of all watches; shared by the watches, `status` and the metrics.
#[derive(Clone, Debug)]
pub struct ClusterHealth {
    server: Arc<str>,
    /// The relay that the objects come from.
    relay: Arc<Mutex<Option<String>>>,
    watches: Arc<Vec<Mutex<State>>>,
    own_node: Arc<Mutex<Option<String>>>,
    /// Why refused objects are not reported in the cluster.
    report_problem: Arc<Mutex<Option<String>>>,
}

#[derive(Clone, Debug)]
struct State {
    has_listed: bool,
    objects: usize,
    /// Why it is stale, and since when.
    stale: Option<(Instant, String)>,
}

/// The cluster as a source.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct ClusterView {
    /// URL of the API server.
    pub server: String,
    /// The relay that the objects come from; none = the API server, or no relay is connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relay: Option<String>,
    /// Each watch.
    pub watches: Vec<WatchHealth>,
    /// Why the object about this node cannot be written; none = it is written.
    #[serde(default)]
    pub own_node: Option<String>,
    /// Why refused objects are not reported in the cluster; none = they are, or there are none.
    #[serde(default)]
    pub report_problem: Option<String>,
}

/// A watch, as it is now.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct WatchHealth {
    /// Its kind.
    pub kind: String,
    /// It has been listed at least once.
    pub has_listed: bool,
    /// Objects that it has.
    pub objects: usize,
    /// How long it has been stale, seconds; 0 = it is not.
    pub stale_seconds: u64,
    /// Why it is stale.
    pub reason: Option<String>,
}

impl ClusterHealth {
    /// Of watches that have not begun.
    pub(crate) fn new(server: &str) -> Self {
        let begin = Instant::now();
        let state = State {
            has_listed: false,
            objects: 0,
            stale: Some((begin, "not listed yet".to_owned())),
        };
        let watches = RESOURCES.iter().map(|_| Mutex::new(state.clone()));
        Self {
            server: server.into(),
            relay: Arc::default(),
            watches: Arc::new(watches.collect()),
            own_node: Arc::default(),
            report_problem: Arc::default(),
        }
    }

    fn with(&self, kind: &str, change: impl FnOnce(&mut State)) {
        let of = RESOURCES.iter().position(|one| one.kind == kind);
        if let Some(state) = of.and_then(|of| self.watches.get(of)) {
            change(&mut state.lock());
        }
    }

    /// The watch follows the server.
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

    /// The watch does not follow the server.
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

    /// As [`Self::set_stale`], of a kind that a relay has not been able to follow for so long.
    #[cfg(feature = "kubernetes")]
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

    /// The objects come from this relay. Gives whether they came from one before.
    #[cfg(feature = "kubernetes")]
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

    /// All objects were read.
    pub(crate) fn set_listed(&self, resource: &Resource) {
        self.with(resource.kind, |state| state.has_listed = true);
    }

    /// Whether all objects have been read once.
    pub(crate) fn has_list(&self, resource: &Resource) -> bool {
        let mut has = false;
        self.with(resource.kind, |state| has = state.has_listed);
        has
    }

    /// Whether the object about this node could be written.
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

    /// How many objects there are.
    pub(crate) fn set_objects(&self, kind: &str, objects: usize) {
        self.with(kind, |state| state.objects = objects);
    }

    /// The server with every watch.
    pub fn view(&self) -> ClusterView {
        ClusterView {
            server: self.server.to_string(),
            relay: self.relay.lock().clone(),
            watches: self.watches(),
            own_node: self.own_node.lock().clone(),
            report_problem: self.report_problem.lock().clone(),
        }
    }

    /// Why refused objects are not reported in the cluster.
    #[cfg(feature = "kubernetes")]
    pub(crate) fn set_report_problem(&self, problem: Option<String>) {
        *self.report_problem.lock() = problem;
    }

    /// Every watch.
    pub fn watches(&self) -> Vec<WatchHealth> {
        let all = RESOURCES.iter().zip(self.watches.iter());
        all.map(|(resource, state)| {
            let state = state.lock();
            let stale = state.stale.as_ref();
            WatchHealth {
                kind: resource.kind.to_owned(),
                has_listed: state.has_listed,
                objects: state.objects,
                stale_seconds: stale.map_or(0, |(since, _)| since.elapsed().as_secs().max(1)),
                reason: stale.map(|(_, reason)| reason.clone()),
            }
        })
        .collect()
    }
}
