//! The task that reads documents, those of `--policy-dir` and those of the cluster, and sends their
//! changes to the core.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use agent_cluster::{
    Watches,
    health::ClusterHealth,
    listing_file::{self, ListingFile, Origin, Stored},
    listing_task::{self, Pending},
    refusals::Refusals,
    resource::RESOURCES,
};
use agent_core::{
    core::{event::Event, router::Router},
    kubernetes::{book::Book, local_pods::LocalPods, unattended::Unattended},
    policy::source::{
        cluster::{Batch, ClusterDocuments, Read},
        merge::Merged,
    },
    source_event::SourceEvent,
};
use dns_policy::wall_time;
use shared_maps::user::trim_heap;
use tokio::{
    sync::watch as channel,
    time::{Instant, sleep_until},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    policy_dir::PolicyDir, resolver::store::feed::Feed, runner::CoreHandle, watched_dir::WatchedDir,
};

/// Batches of watches that are routed at once.
const BATCHES: usize = 64;
/// How long the watches may take for their first lists before a stored listing stands in.
const STANDS_IN: Duration = Duration::from_secs(15);

/// Where documents come from.
#[derive(Debug)]
pub(crate) struct Sources {
    /// The directory.
    pub(crate) directory: Option<(WatchedDir, PolicyDir)>,
    /// The watches of the cluster.
    pub(crate) cluster: Option<Watches>,
    /// State directory, and the cluster whose listing is stored there.
    pub(crate) stored: (PathBuf, Origin),
    /// Takes the pods of this node.
    pub(crate) local: channel::Sender<Arc<LocalPods>>,
    /// Takes the DNSNameResolvers, if they are used.
    pub(crate) names: Option<Arc<Feed>>,
    /// Finds nodes without an agent, if agents are pods.
    pub(crate) unattended: Option<Unattended>,
}

/// What is read next.
enum Wake {
    Directory,
    Cluster(Vec<Batch>),
    Stored(Vec<(String, Read)>),
}

/// State of the task, apart from what it waits for.
struct Reader {
    directory: Option<PolicyDir>,
    merged: Merged,
    router: Router,
    has_listed: bool,
    /// Where changes of the cluster go that are to be stored.
    pending: Arc<Pending>,
    /// Kinds that a stored listing has begun to stand in for, with the number of their objects.
    stood_in: Vec<(&'static str, usize)>,
    /// The stored listing was found to be of another cluster.
    is_foreign: bool,
}

impl Reader {
    fn read(&mut self, wake: Wake) -> Vec<Event> {
        let changes = match wake {
            Wake::Cluster(batches) => {
                let changes = self.merged.watched(batches);
                self.store();
                changes
            }
            Wake::Stored(documents) => {
                let (kinds, changes) = self.merged.stand_in(documents);
                let documents = self.merged.cluster();
                let count = |kind| documents.map_or(0, |documents| documents.count(kind));
                self.stood_in = kinds.into_iter().map(|kind| (kind, count(kind))).collect();
                changes
            }
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

    /// Notes what is to be stored.
    fn store(&mut self) {
        if let Some(documents) = self.merged.cluster_mut() {
            match documents.take_changed() {
                Some(changed) => self.pending.add(changed, documents.is_current()),
                None => self.pending.give_up(),
            }
        }
    }

    /// How many objects of the cluster there are, and which are refused.
    fn report(&mut self, health: &ClusterHealth, refusals: &channel::Sender<Arc<Refusals>>) {
        let Some(documents) = self.merged.cluster() else {
            return;
        };
        for resource in RESOURCES {
            health.set_objects(resource.kind, documents.count(resource.kind));
        }
        if let Some(uid) = documents.foreign_list()
            && !std::mem::replace(&mut self.is_foreign, true)
        {
            let problem = format!(
                "the stored list of the cluster that stands in is of another cluster: the uid of its namespace \
                 kube-system is {uid}; the list of each kind replaces it"
            );
            tracing::error!(problem);
            health.set_stored_problem(problem);
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
    let pending = Arc::<Pending>::default();
    if let Some(watches) = &sources.cluster {
        let (state, origin) = &sources.stored;
        let file = ListingFile::new(state, origin.clone());
        let health = watches.health.clone();
        let storing = listing_task::run(Arc::clone(&pending), file, health, stop.clone());
        tasks.spawn(storing);
    }
    tasks.spawn(async move {
        if sources.directory.is_none() && sources.cluster.is_none() {
            for event in [SourceEvent::Init, SourceEvent::InitDone] {
                let _stopped = core.send(Event::Policies(event)).await;
            }
            return;
        }
        follow(sources, book, pending, &core, &stop).await;
    });
}

/// Reads until the agent stops.
async fn follow(
    sources: Sources,
    book: Book,
    pending: Arc<Pending>,
    core: &CoreHandle,
    stop: &CancellationToken,
) {
    let Sources {
        directory,
        cluster,
        stored: (state, origin),
        local,
        names,
        unattended,
    } = sources;
    let stands_in = Instant::now() + STANDS_IN;
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
    let documents = cluster.is_some().then(|| {
        let mut documents = ClusterDocuments::new(kinds());
        documents.note_changed();
        documents
    });
    let mut may_stand_in = documents.is_some();
    let mut merged = Merged::new(documents);
    if directory.is_none() {
        merged.without_directory();
    }
    let mut reader = Reader {
        directory,
        merged,
        router: Router::new(book).with_unattended(unattended),
        has_listed: false,
        pending,
        stood_in: Vec::new(),
        is_foreign: false,
    };
    let mut stored_of = None;
    let mut was_complete = false;
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
            if let Some(age) = stored_of.take() {
                health.set_stored(&std::mem::take(&mut reader.stood_in), age);
            }
            reader.report(health, refusals);
            if let Some(nodes) = reader.router.take_unattended() {
                health.set_unattended(nodes);
            }
        }
        let documents = reader.merged.cluster();
        let is_complete = documents.is_some_and(ClusterDocuments::is_complete);
        let begins = is_complete && !was_complete;
        was_complete = is_complete;
        may_stand_in &= !is_complete;
        let pods = reader.router.take_local();
        let changed_names = reader.router.take_names();
        if let Some(feed) = &names {
            feed.add(changed_names);
        }
        for event in events {
            if core.send(event).await.is_err() {
                return;
            }
        }
        if let Some(pods) = pods.filter(|_| cluster.is_some()) {
            local.send_replace(Arc::new(pods));
        }
        if begins {
            // The first lists have left holes.
            let _trimmed = tokio::task::spawn_blocking(trim_heap).await;
        }
        wake = loop {
            tokio::select! {
                () = changed(watched.as_ref()) => break Wake::Directory,
                batches = received(batches.as_mut()) => break Wake::Cluster(batches),
                () = sleep_until(stands_in), if may_stand_in => {}
                () = stop.cancelled() => return,
            }
            may_stand_in = false;
            let uid = reader.merged.cluster().and_then(ClusterDocuments::uid);
            if let Some((health, _)) = &cluster
                && let Some(stored) = read_stored(&state, &origin, uid.cloned(), health).await
            {
                stored_of = Some(stored.age);
                break Wake::Stored(stored.documents);
            }
        };
    }
}

/// The stored listing, if there is one that can be used.
async fn read_stored(
    state: &Path,
    origin: &Origin,
    uid: Option<Arc<str>>,
    health: &ClusterHealth,
) -> Option<Stored> {
    let (path, origin) = (ListingFile::path(state), origin.clone());
    let reading = move || listing_file::read(&path, &origin, uid.as_ref(), wall_time::of_file());
    match tokio::task::spawn_blocking(reading).await {
        Ok(Ok(Some(stored))) => {
            let age = stored.age.as_secs();
            tracing::warn!(
                age,
                "the API server does not answer; the stored list of the cluster stands in"
            );
            Some(stored)
        }
        Ok(Ok(None)) => None,
        Ok(Err(error)) => {
            tracing::error!(%error, "the stored list of the cluster is not used");
            health.set_stored_problem(format!(
                "the stored list of the cluster is not used: {error}"
            ));
            None
        }
        Err(_) => {
            tracing::error!("reading the stored list of the cluster panicked (a bug)");
            None
        }
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
