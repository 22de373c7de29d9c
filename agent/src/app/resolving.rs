//! Starts the resolver, and connects it with the core.

use std::sync::Arc;

use agent_cluster::api::client::Api;
use agent_core::core::Event;
use tokio::sync::mpsc;

use super::Rim;
use crate::{
    config::Config,
    resolver::{
        Place, ResolverSettings,
        feed::ResolverFeed,
        object::AddressFilter,
        queue::Observations,
        store::{feed::Feed, file::FileStore},
        task::{self, Ends, ResolverHandle},
    },
};

/// The resolver before the core runs.
pub(super) struct Resolving {
    /// Sends answers, names and DNS servers from the core to the resolver.
    pub(super) feed: ResolverFeed,
    observations: Observations,
}

/// Handles of the started resolver; both are `None` if no resolver is configured.
#[derive(Default)]
pub(super) struct Started {
    /// Sends requests to the resolver's task.
    pub(super) handle: Option<ResolverHandle>,
    /// Takes the objects of the cluster.
    pub(super) objects: Option<Arc<Feed>>,
}

impl Resolving {
    /// Without a resolver, the answers that the core sends are dropped.
    pub(super) fn new(config: &Config) -> Self {
        let observations = Observations::default();
        let feed = ResolverFeed::default();
        let feed = match config.resolver {
            Some(_) => {
                let queue = observations.clone();
                feed.observed_by(move |observation| queue.push(observation))
            }
            None => feed,
        };
        Self { feed, observations }
    }

    /// Starts the resolver, if there is a place for its objects.
    pub(super) fn start(self, config: &Config, rim: &Rim, api: Option<&Api>) -> Started {
        let Some(settings) = &config.resolver else {
            return Started::default();
        };
        let (resolved, mut received) = mpsc::channel(16);
        let core = rim.core.clone();
        rim.tasks.spawn(async move {
            while let Some(events) = received.recv().await {
                if core.send(Event::Resolved(events)).await.is_err() {
                    return;
                }
            }
        });
        let ends = Ends {
            observations: self.observations,
            names: self.feed.names(),
            servers: self.feed.servers(),
            resolved,
        };
        let filter = AddressFilter {
            ipv4: config.core.enable_ipv4,
            ipv6: config.core.enable_ipv6,
            // Empty: the core never counts addresses of pods and Services as outside.
            left_out: Vec::new(),
        };
        let (tasks, stop) = (&rim.tasks, &rim.stop);
        match (&settings.place, api) {
            (Place::Directory(dir), _) => {
                let store = FileStore::new(dir, &settings.namespace);
                Started {
                    handle: Some(task::start(store, settings, filter, ends, tasks, stop)),
                    objects: None,
                }
            }
            (Place::Kubernetes, Some(api)) => in_cluster(api, config, settings, |store| {
                task::start(store, settings, filter, ends, tasks, stop)
            }),
            (Place::Kubernetes, None) => Started::default(),
        }
    }
}

#[cfg(feature = "kubernetes")]
fn in_cluster(
    api: &Api,
    config: &Config,
    settings: &ResolverSettings,
    start: impl FnOnce(crate::resolver::store::kube::KubeStore) -> ResolverHandle,
) -> Started {
    use crate::resolver::store::kube::{Access, KubeSettings, KubeStore};

    let objects = Arc::new(Feed::new(&settings.namespace));
    let kube = KubeSettings {
        namespace: settings.namespace.clone(),
        node: config.node_name.clone(),
        lease: settings.lease,
        access: match settings.writes {
            true => Access::Write,
            false => Access::Consume,
        },
    };
    let store = KubeStore::new(api.clone(), Arc::clone(&objects), kube);
    Started {
        handle: Some(start(store)),
        objects: Some(objects),
    }
}

/// Without the client for the API server, the agent is in no cluster.
#[cfg(not(feature = "kubernetes"))]
fn in_cluster(
    _api: &Api,
    _config: &Config,
    _settings: &ResolverSettings,
    _start: impl FnOnce(FileStore) -> ResolverHandle,
) -> Started {
    Started::default()
}
