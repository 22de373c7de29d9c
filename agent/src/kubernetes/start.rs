//! Starts the watches, and the task that writes the object about this node.

use std::{hash::RandomState, sync::Arc};

use tokio::sync::{mpsc, watch as channel};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    Here, Watches, client::Api, health::ClusterHealth, own_node, refusals::Refusals,
    report::Reporter, resource::RESOURCES, watch::Watch,
};

/// Batches that wait for the documents' task: a page of a list each.
const QUEUE: usize = 8;

/// Starts a watch for each kind, and the reports of this node.
pub(crate) fn start(
    api: &Api,
    here: Here,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) -> Watches {
    let health = ClusterHealth::new(api.server());
    let (send, batches) = mpsc::channel(QUEUE);
    for resource in RESOURCES {
        let watch = Watch {
            api: api.clone(),
            resource,
            health: health.clone(),
            send: send.clone(),
            has_service_blocks: here.has_service_blocks,
            hash: RandomState::new(),
        };
        tasks.spawn(watch.run(stop.clone()));
    }
    let (refusals, received) = channel::channel(Arc::<Refusals>::default());
    let reporter = Reporter {
        api: api.clone(),
        node: here.node.clone(),
        refusals: received,
        health: health.clone(),
    };
    tasks.spawn(reporter.run(stop.clone()));
    let own_node = own_node::run(api.clone(), here.node, health.clone(), stop.clone());
    tasks.spawn(own_node);
    Watches {
        batches,
        health,
        refusals,
    }
}
