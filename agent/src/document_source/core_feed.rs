//! Changes of documents for the core of `run`, and for the receivers of other objects.

use std::{collections::BTreeSet, sync::Arc};

use agent_cluster::health::ClusterHealth;
use agent_core::{
    core::{event::Event, router::Router},
    high_scale::objects::HighScaleView,
    kubernetes::local_pods::LocalPods,
    name_objects::object::Resolver,
    policy::source::PolicyChange,
    source_event::SourceEvent,
};
use tokio::sync::watch as channel;

use super::{Consumer, Gone};
use crate::{resolver::store::feed::Feed, runner::CoreHandle};

/// Sends changes to the core.
#[derive(Debug)]
pub(crate) struct CoreFeed {
    pub(crate) router: Router,
    pub(crate) core: CoreHandle,
    /// Takes the pods of this node.
    pub(crate) local: channel::Sender<Arc<LocalPods>>,
    /// Takes what objects say about the tunnel between nodes.
    pub(crate) high_scale: channel::Sender<HighScaleView>,
    /// Takes the DNSNameResolvers, if they are used.
    pub(crate) names: Option<Arc<Feed>>,
    /// Takes the nodes without an agent; `None` without a cluster.
    pub(crate) health: Option<ClusterHealth>,
}

/// The changes of one reading, by receiver.
pub(crate) struct Routed {
    events: Vec<Event>,
    pods: Option<LocalPods>,
    names: Vec<SourceEvent<Arc<Resolver>>>,
    unattended: Option<BTreeSet<String>>,
    high_scale: Option<HighScaleView>,
}

impl Consumer for CoreFeed {
    type Output = Routed;

    fn take(&mut self, changes: Vec<PolicyChange>) -> Routed {
        Routed {
            events: self.router.route(changes),
            pods: self.router.take_local(),
            names: self.router.take_names(),
            unattended: self.router.take_unattended(),
            high_scale: self.router.take_high_scale(),
        }
    }

    /// The pods of this node are sent after the events.
    async fn pass_on(&mut self, routed: Routed) -> Result<(), Gone> {
        if let (Some(health), Some(nodes)) = (&self.health, routed.unattended) {
            health.set_unattended(nodes);
        }
        if let Some(feed) = &self.names {
            feed.add(routed.names);
        }
        for event in routed.events {
            self.core.send(event).await.map_err(|_| Gone)?;
        }
        if let Some(pods) = routed.pods {
            self.local.send_replace(Arc::new(pods));
        }
        if let Some(view) = routed.high_scale {
            self.high_scale.send_replace(view);
        }
        Ok(())
    }
}
