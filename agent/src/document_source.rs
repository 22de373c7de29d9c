//! The task that reads documents, those of `--policy-dir` and those of the cluster, and sends their
//! changes to the core.

use std::sync::Arc;

use tokio::sync::watch as channel;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    core::{event::Event, router::Router},
    kubernetes::{
        Watches, book::Book, health::ClusterHealth, local_pods::LocalPods, refusals::Refusals,
        resource::RESOURCES,
    },
    policy::source::{
        cluster::{Batch, ClusterDocuments},
        dir::PolicyDir,
        merge::Merged,
    },
    runner::CoreHandle,
    source_event::SourceEvent,
    watched_dir::WatchedDir,
};

/// Batches of watches that are routed at once.
const BATCHES: usize = 64;

/// Where documents come from.
#[derive(Debug)]
pub(crate) struct Sources {
    /// The directory.
    pub(crate) directory: Option<(WatchedDir, PolicyDir)>,
    /// The watches of the cluster.
    pub(crate) cluster: Option<Watches>,
    /// Takes the pods of this node.
    pub(crate) local: channel::Sender<Arc<LocalPods>>,
}

/// What is read next.
enum Wake {
    Directory,
    Cluster(Vec<Batch>),
}

/// State of the task, apart from what it waits for.
struct Reader {
    directory: Option<PolicyDir>,
    merged: Merged,
    router: Router,
    has_listed: bool,
}

impl Reader {
    fn read(&mut self, wake: Wake) -> Vec<Event> {
        let changes = match wake {
            Wake::Cluster(batches) => self.merged.watched(batches),
            Wake::Directory => {
                let changes = match (&mut self.directory, self.has_listed) {
                    (Some(directory), false) => directory.list(),
                    (Some(directory), true) => directory.refresh(),
                    (None, _) => Vec::new(),
                };
                self.has_listed = true;
                self.merged.directory(changes)
            }
        };
        self.router.route(changes)
    }

    /// How many objects of the cluster there are, and which are refused.
    fn report(&mut self, health: &ClusterHealth, refusals: &channel::Sender<Arc<Refusals>>) {
        let Some(documents) = self.merged.cluster() else {
            return;
        };
        for resource in RESOURCES {
            health.set_objects(resource.kind, documents.count(resource.kind));
        }
        if let Some(refused) = self.take_refusals() {
            refusals.send_replace(Arc::new(refused));
        }
    }

    /// The refused objects of the cluster, if they changed.
    fn take_refusals(&mut self) -> Option<Refusals> {
        let documents = self.merged.cluster_mut()?;
        let changed = documents.is_complete() && documents.take_refusals_changed();
        changed.then(|| Refusals::of(documents.refused(), documents.marked()))
    }
}

/// Starts the task. Without any source the listing is empty.
pub(crate) fn start(
    sources: Sources,
    book: Book,
    core: &CoreHandle,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) {
    let core = core.clone();
    let stop = stop.clone();
    tasks.spawn(async move {
        if sources.directory.is_none() && sources.cluster.is_none() {
            for event in [SourceEvent::Init, SourceEvent::InitDone] {
                let _stopped = core.send(Event::Policies(event)).await;
            }
            return;
        }
        follow(sources, book, &core, &stop).await;
    });
}

/// Reads until the agent stops.
async fn follow(sources: Sources, book: Book, core: &CoreHandle, stop: &CancellationToken) {
    let Sources {
        directory,
        cluster,
        local,
    } = sources;
    let (watched, directory) = directory.unzip();
    let (mut batches, cluster) = match cluster {
        Some(Watches {
            batches,
            health,
            refusals,
        }) => (Some(batches), Some((health, refusals))),
        None => (None, None),
    };
    let kinds = || RESOURCES.iter().map(|resource| resource.kind);
    let documents = cluster.is_some().then(|| ClusterDocuments::new(kinds()));
    let mut merged = Merged::new(documents);
    if directory.is_none() {
        merged.without_directory();
    }
    let mut reader = Reader {
        directory,
        merged,
        router: Router::new(book),
        has_listed: false,
    };
    let mut wake = Wake::Directory;
    loop {
        let looked = tokio::task::spawn_blocking(move || {
            let events = reader.read(wake);
            (reader, events)
        });
        let Ok((read, events)) = looked.await else {
            tracing::error!("reading the policies panicked (a bug); the policies in force remain");
            return;
        };
        reader = read;
        if let Some((health, refusals)) = &cluster {
            reader.report(health, refusals);
        }
        let pods = reader.router.take_local();
        for event in events {
            if core.send(event).await.is_err() {
                return;
            }
        }
        if let Some(pods) = pods.filter(|_| cluster.is_some()) {
            local.send_replace(Arc::new(pods));
        }
        wake = tokio::select! {
            () = changed(watched.as_ref()) => Wake::Directory,
            batches = received(batches.as_mut()) => Wake::Cluster(batches),
            () = stop.cancelled() => return,
        };
    }
}

async fn changed(watched: Option<&WatchedDir>) {
    match watched {
        Some(watched) => watched.changed().await,
        None => std::future::pending().await,
    }
}

async fn received(batches: Option<&mut tokio::sync::mpsc::Receiver<Batch>>) -> Vec<Batch> {
    let mut received = Vec::new();
    if let Some(batches) = batches
        && batches.recv_many(&mut received, BATCHES).await > 0
    {
        return received;
    }
    std::future::pending().await
}
