//! The task that reads documents, those of `--policy-dir` and those of the cluster, and sends their
//! changes to the core.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
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
        cluster::{Batch, ClusterDocuments},
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
    policy_dir::PolicyDir,
    resolver::store::feed::Feed,
    runner::{CoreAway, CoreHandle},
    watched_dir::WatchedDir,
};

/// Batches of watches that are routed at once.
const BATCHES: usize = 64;
/// Most objects that the task reads itself: less work than passing them to another thread and back.
const FEW: usize = 16;
/// How long the watches may take for their first lists before a stored listing stands in.
const STANDS_IN: Duration = Duration::from_secs(15);

/// Sources of documents, and receivers of other objects that the same watches read.
#[derive(Debug)]
pub(crate) struct Sources {
    /// Watch and reader of `--policy-dir`; `None` = the flag is not given.
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

/// The next input that the task reads.
enum Wake {
    Directory,
    Cluster(Vec<Batch>),
    Stored(Stored),
}

impl Wake {
    fn is_short(&self) -> bool {
        match self {
            Self::Cluster(batches) => {
                batches.iter().map(|batch| batch.seen.len()).sum::<usize>() <= FEW
            }
            Self::Directory | Self::Stored(_) => false,
        }
    }
}

/// State of the task, apart from what it waits for.
struct Reader {
    directory: Option<PolicyDir>,
    merged: Merged,
    router: Router,
    has_listed: bool,
    /// Where changes of the cluster go that are to be stored.
    pending: Arc<Pending>,
    /// The stored listing that has begun to stand in, until it is reported.
    stood_in: Option<StoodIn>,
    /// The stored listing was found to be of another cluster.
    is_foreign: bool,
}

/// A stored listing that stands in.
struct StoodIn {
    /// Kinds that it stands in for, with the number of their objects.
    kinds: Vec<(&'static str, usize)>,
    age: Duration,
}

impl Reader {
    fn new(
        directory: Option<PolicyDir>,
        has_cluster: bool,
        router: Router,
        pending: Arc<Pending>,
    ) -> Self {
        let documents = has_cluster.then(|| {
            let kinds = RESOURCES.iter().map(|resource| resource.kind);
            let mut documents = ClusterDocuments::new(kinds);
            documents.note_changed();
            documents
        });
        let mut merged = Merged::new(documents);
        if directory.is_none() {
            merged.without_directory();
        }
        Self {
            directory,
            merged,
            router,
            has_listed: false,
            pending,
            stood_in: None,
            is_foreign: false,
        }
    }

    fn read(&mut self, wake: Wake) -> Vec<Event> {
        let changes = match wake {
            Wake::Cluster(batches) => {
                let changes = self.merged.watched(batches);
                self.store();
                changes
            }
            Wake::Stored(Stored { documents, age }) => {
                let (kinds, changes) = self.merged.stand_in(documents);
                let documents = self.merged.cluster();
                let count = |kind| documents.map_or(0, |documents| documents.count(kind));
                let kinds = kinds.into_iter().map(|kind| (kind, count(kind))).collect();
                self.stood_in = Some(StoodIn { kinds, age });
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

    /// Reports the objects of the cluster: what stands in for them, how many there are, which are
    /// refused, and which nodes have no agent.
    fn report(&mut self, health: &ClusterHealth, refusals: &channel::Sender<Arc<Refusals>>) {
        if let Some(StoodIn { kinds, age }) = self.stood_in.take() {
            health.set_stored(&kinds, age);
        }
        self.report_objects(health, refusals);
        if let Some(nodes) = self.router.take_unattended() {
            health.set_unattended(nodes);
        }
    }

    fn report_objects(
        &mut self,
        health: &ClusterHealth,
        refusals: &channel::Sender<Arc<Refusals>>,
    ) {
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

    /// Whether every watch of the cluster has listed its objects.
    fn is_complete(&self) -> bool {
        let documents = self.merged.cluster();
        documents.is_some_and(ClusterDocuments::is_complete)
    }

    /// Uid of the cluster, if a watch has seen it.
    fn uid(&self) -> Option<Arc<str>> {
        let documents = self.merged.cluster();
        documents.and_then(ClusterDocuments::uid).cloned()
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
        stored,
        local,
        names,
        unattended,
    } = sources;
    let (watched, directory) = directory.unzip();
    let router = Router::new(book).with_unattended(unattended);
    let mut reader = Reader::new(directory, cluster.is_some(), router, pending);
    let mut inputs = Inputs::new(watched, cluster, stored);
    let outputs = Outputs { core, local, names };
    let mut was_complete = false;
    let mut wake = Wake::Directory;
    loop {
        let is_short = wake.is_short();
        let look = move || {
            let events = reader.read(wake);
            (reader, events)
        };
        let looked = if is_short {
            catch_unwind(AssertUnwindSafe(look)).ok()
        } else {
            tokio::task::spawn_blocking(look).await.ok()
        };
        let Some((read, events)) = looked else {
            tracing::error!("reading the policies panicked (a bug); the policies in force remain");
            return;
        };
        reader = read;
        if let Some(watches) = &inputs.watches {
            reader.report(&watches.health, &watches.refusals);
        }
        let is_complete = reader.is_complete();
        if is_complete {
            inputs.stands_in = None;
        }
        if outputs.send(&mut reader, events).await.is_err() {
            return;
        }
        if is_complete && !was_complete {
            // The first lists have left holes.
            let _trimmed = tokio::task::spawn_blocking(trim_heap).await;
        }
        was_complete = is_complete;
        let Some(next) = inputs.next(reader.uid(), stop).await else {
            return;
        };
        wake = next;
    }
}

/// What the task waits for.
struct Inputs {
    watched: Option<WatchedDir>,
    watches: Option<Watches>,
    /// State directory, and the cluster whose listing is stored there.
    stored: (PathBuf, Origin),
    /// When the stored listing stands in. `None` if it is not to be read, or not again.
    stands_in: Option<Instant>,
}

impl Inputs {
    fn new(
        watched: Option<WatchedDir>,
        watches: Option<Watches>,
        stored: (PathBuf, Origin),
    ) -> Self {
        Self {
            stands_in: watches.as_ref().map(|_| Instant::now() + STANDS_IN),
            watched,
            watches,
            stored,
        }
    }

    /// Waits until there is something to read. Returns `None` when the agent stops. `uid` is the uid of
    /// the cluster, if a watch has seen it.
    async fn next(&mut self, uid: Option<Arc<str>>, stop: &CancellationToken) -> Option<Wake> {
        loop {
            let batches = self.watches.as_mut().map(|watches| &mut watches.batches);
            tokio::select! {
                () = changed(self.watched.as_ref()) => return Some(Wake::Directory),
                batches = received(batches) => return Some(Wake::Cluster(batches)),
                () = reached(self.stands_in) => {}
                () = stop.cancelled() => return None,
            }
            self.stands_in = None;
            let (state, origin) = &self.stored;
            if let Some(watches) = &self.watches
                && let Some(stored) = read_stored(state, origin, uid.clone(), &watches.health).await
            {
                return Some(Wake::Stored(stored));
            }
        }
    }
}

/// Where changes go.
struct Outputs<'c> {
    core: &'c CoreHandle,
    local: channel::Sender<Arc<LocalPods>>,
    names: Option<Arc<Feed>>,
}

impl Outputs<'_> {
    /// Sends the events to the core, and other changes to their receivers. The pods of this node are
    /// sent after the events.
    async fn send(&self, reader: &mut Reader, events: Vec<Event>) -> Result<(), CoreAway> {
        let pods = reader.router.take_local();
        let changed_names = reader.router.take_names();
        if let Some(feed) = &self.names {
            feed.add(changed_names);
        }
        for event in events {
            self.core.send(event).await?;
        }
        if let Some(pods) = pods.filter(|_| reader.merged.cluster().is_some()) {
            self.local.send_replace(Arc::new(pods));
        }
        Ok(())
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
                "not all objects of the cluster were listed in time; the stored list is used for the missing kinds"
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

/// Returns at this time; never if there is none.
async fn reached(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
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
