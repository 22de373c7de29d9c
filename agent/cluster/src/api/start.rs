//! Starts the watches, and the tasks that write: the object about this node, and the reports of
//! refused objects.

use std::{hash::RandomState, sync::Arc};

use agent_core::policy::{parse::parse_object, source::cluster::Batch};
use tokio::sync::{mpsc, watch as channel};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    client::Api,
    own_node::{self, OwnNode},
    report::Reporter,
    watch::{Reader, Watch},
};
use crate::{Here, Watches, health::ClusterHealth, refusals::Refusals};

/// Maximum batches that wait for the documents' task. Each batch is a page of a list.
const QUEUE: usize = 8;

/// Starts a watch for each kind, and the reports of this node.
pub fn start(api: &Api, here: Here, tasks: &TaskTracker, stop: &CancellationToken) -> Watches {
    let health = ClusterHealth::new(api.server(), here.resources);
    let batches = watch_all(api, &here, &health, parse_object, tasks, stop);
    let refusals = match here.reads_only {
        true => channel::channel(Arc::default()).0,
        false => {
            let refusals = report(api, &here.node, &health, tasks, stop);
            write_own_node(api, (here.node, here.high_scale), &health, tasks, stop);
            refusals
        }
    };
    Watches {
        batches,
        health,
        refusals,
    }
}

/// Starts a watch for each kind. `read` reads the objects.
pub(crate) fn watch_all<T: Send + 'static>(
    api: &Api,
    here: &Here,
    health: &ClusterHealth,
    read: Reader<T>,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) -> mpsc::Receiver<Batch<T>> {
    let (send, batches) = mpsc::channel(QUEUE);
    for resource in here.resources {
        let watch = Watch {
            api: api.clone(),
            resource,
            health: health.clone(),
            send: send.clone(),
            read,
            has_service_blocks: here.has_service_blocks,
            pods: here.pods.clone(),
            hash: RandomState::new(),
        };
        tasks.spawn(watch.run(stop.clone()));
    }
    batches
}

/// Starts the reports of refused objects. `node` names the writer in the Lease.
pub(crate) fn report(
    api: &Api,
    node: &str,
    health: &ClusterHealth,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) -> channel::Sender<Arc<Refusals>> {
    let (refusals, received) = channel::channel(Arc::<Refusals>::default());
    let reporter = Reporter {
        api: api.clone(),
        node: node.to_owned(),
        refusals: received,
        health: health.clone(),
    };
    tasks.spawn(reporter.run(stop.clone()));
    refusals
}

/// Starts the task that writes the object about this node.
pub(crate) fn write_own_node(
    api: &Api,
    (name, high_scale): (String, Option<&'static str>),
    health: &ClusterHealth,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) {
    let node = OwnNode {
        api: api.clone(),
        name,
        high_scale,
    };
    let own_node = own_node::run(node, health.clone(), stop.clone());
    tasks.spawn(own_node);
}
