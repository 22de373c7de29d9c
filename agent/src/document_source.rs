//! The task that reads the documents of `--policy-dir` and of the cluster, and passes their
//! changes to a [`Consumer`].

pub(crate) mod core_feed;

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
};
use agent_core::{
    high_scale::scope::PodScope,
    policy::source::{
        PolicyChange,
        cluster::{Batch, ClusterDocuments},
        merge::Merged,
    },
    source_event::SourceEvent,
};
use daemon::state_file::StateFileError;
use dns_policy::wall_time;
use shared_maps::user::trim_heap;
use tokio::{
    sync::watch as channel,
    time::{Instant, sleep_until},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    policy_dir::{PolicyDir, last_good::LastGood},
    watched_dir::WatchedDir,
};

/// Batches of watches that are routed at once.
const BATCHES: usize = 64;
/// Maximum objects that the task reads itself: passing so few to another thread and back is more work.
const FEW: usize = 16;
/// How long the watches may take for their first lists before the stored list is used.
const STANDS_IN: Duration = Duration::from_secs(15);

/// The receiver of changes has ended.
#[derive(Debug)]
pub(crate) struct Gone;

/// Takes the changes of documents.
pub(crate) trait Consumer: Send + 'static {
    /// The result of the changes of one reading.
    type Output: Send + 'static;

    /// Takes the changes of one reading, on a thread that may block.
    fn take(&mut self, changes: Vec<PolicyChange>) -> Self::Output;

    /// Passes the result on. The next reading begins when it is done.
    fn pass_on(
        &mut self,
        output: Self::Output,
    ) -> impl Future<Output = Result<(), Gone>> + Send + '_;
}

/// Sources of documents.
#[derive(Debug)]
pub(crate) struct Sources {
    /// Watch and reader of `--policy-dir`; `None` = the flag is not given.
    pub(crate) directory: Option<(WatchedDir, PolicyDir)>,
    /// The watches of the cluster.
    pub(crate) cluster: Option<Watches>,
    /// State directory, and the cluster whose listing is stored there; `None` = nothing is stored.
    pub(crate) stored: Option<(PathBuf, Origin)>,
    /// Whether this agent reports the object of a key in the cluster.
    pub(crate) reports: fn(&str) -> bool,
    /// Pods of the cluster that are read.
    pub(crate) pods: PodScope,
}

/// Opens `--policy-dir`, with the last good versions of its documents, which are in the directory `state`. `None`: the
/// flag is not given. Last good versions that cannot be used are added to `damaged`.
pub(crate) fn directory(
    dir: Option<&Path>,
    state: &Path,
    damaged: &mut Vec<String>,
) -> Result<Option<(WatchedDir, PolicyDir)>, StateFileError> {
    let Some(dir) = dir else {
        return Ok(None);
    };
    let kept = LastGood::open(state, dir, damaged)?;
    Ok(Some((
        WatchedDir::new(dir),
        PolicyDir::with_last_good(dir, kept),
    )))
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
struct Reader<C> {
    directory: Option<PolicyDir>,
    merged: Merged,
    consumer: C,
    reports: fn(&str) -> bool,
    has_listed: bool,
    /// Takes changes of the cluster that have to be stored.
    pending: Arc<Pending>,
    /// The stored list that the task has begun to use, until it is reported.
    stood_in: Option<StoodIn>,
    /// Whether the stored list describes another cluster.
    is_foreign: bool,
}

/// A stored list that is in use.
struct StoodIn {
    /// Kinds for which it is used, with the number of their objects.
    kinds: Vec<(&'static str, usize)>,
    age: Duration,
}

impl<C: Consumer> Reader<C> {
    fn new(
        directory: Option<PolicyDir>,
        (cluster, pods): (Option<&ClusterHealth>, PodScope),
        consumer: C,
        reports: fn(&str) -> bool,
        pending: Arc<Pending>,
    ) -> Self {
        let documents = cluster.map(|cluster| {
            let mut documents = ClusterDocuments::new(cluster.kinds());
            if pods.prunes() {
                documents = documents.of_scope(Box::new(move |document| pods.has(document)));
            }
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
            consumer,
            reports,
            has_listed: false,
            pending,
            stood_in: None,
            is_foreign: false,
        }
    }

    fn read(&mut self, wake: Wake) -> C::Output {
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
        self.consumer.take(changes)
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

    /// Reports the objects of the cluster: the stored list that is used for them, how many there are, and which
    /// are refused.
    fn report(&mut self, health: &ClusterHealth, refusals: &channel::Sender<Arc<Refusals>>) {
        if let Some(StoodIn { kinds, age }) = self.stood_in.take() {
            health.set_stored(&kinds, age);
        }
        self.report_objects(health, refusals);
    }

    fn report_objects(
        &mut self,
        health: &ClusterHealth,
        refusals: &channel::Sender<Arc<Refusals>>,
    ) {
        let Some(documents) = self.merged.cluster() else {
            return;
        };
        for kind in health.kinds() {
            health.set_objects(kind, documents.count(kind));
        }
        if let Some(uid) = documents.foreign_list()
            && !std::mem::replace(&mut self.is_foreign, true)
        {
            let problem = format!(
                "the stored list of the cluster, which is in use, is of another cluster: the uid of its namespace \
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
        let reports = self.reports;
        let documents = self.merged.cluster_mut()?;
        let changed = documents.is_complete() && documents.take_refusals_changed();
        changed.then(|| {
            let refused = documents.refused();
            let refused = refused.filter(|error| error.key.as_deref().is_some_and(reports));
            let marked = documents.marked().filter(|key| reports(key));
            Refusals::of(refused, marked)
        })
    }
}

/// Starts the task. Without any source the listing is empty.
pub(crate) fn start<C: Consumer>(
    sources: Sources,
    mut consumer: C,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) {
    let stop = stop.clone();
    let pending = Arc::<Pending>::default();
    if let (Some(watches), Some((state, origin))) = (&sources.cluster, &sources.stored) {
        let file = ListingFile::new(state, origin.clone());
        let health = watches.health.clone();
        let storing = listing_task::run(Arc::clone(&pending), file, health, stop.clone());
        tasks.spawn(storing);
    }
    tasks.spawn(async move {
        if sources.directory.is_none() && sources.cluster.is_none() {
            let empty = [SourceEvent::Init, SourceEvent::InitDone];
            let empty = consumer.take(empty.map(PolicyChange::Document).into());
            let _stopped = consumer.pass_on(empty).await;
            return;
        }
        follow(sources, consumer, pending, &stop).await;
    });
}

/// Reads until the agent stops.
async fn follow<C: Consumer>(
    sources: Sources,
    consumer: C,
    pending: Arc<Pending>,
    stop: &CancellationToken,
) {
    let Sources {
        directory,
        cluster,
        stored,
        reports,
        pods,
    } = sources;
    let (watched, directory) = directory.unzip();
    let health = cluster.as_ref().map(|watches| &watches.health);
    let mut reader = Reader::new(directory, (health, pods), consumer, reports, pending);
    let mut inputs = Inputs::new(watched, cluster, stored);
    let begin = Instant::now();
    let mut is_first = inputs.watched.is_some();
    let mut was_complete = false;
    let mut wake = Wake::Directory;
    loop {
        let Some((read, output)) = read(reader, wake).await else {
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
        if reader.consumer.pass_on(output).await.is_err() {
            return;
        }
        if is_first {
            tracing::info!(took = ?begin.elapsed(), "the policy directory is read");
        }
        is_first = false;
        if is_complete && !was_complete {
            tracing::info!(took = ?begin.elapsed(), "the objects of the cluster are listed");
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

/// Reads one input, on a thread of its own if it may be long. `None`: the reader panicked.
async fn read<C: Consumer>(mut reader: Reader<C>, wake: Wake) -> Option<(Reader<C>, C::Output)> {
    let is_short = wake.is_short();
    let look = move || {
        let output = reader.read(wake);
        (reader, output)
    };
    match is_short {
        true => catch_unwind(AssertUnwindSafe(look)).ok(),
        false => tokio::task::spawn_blocking(look).await.ok(),
    }
}

/// What the task waits for.
struct Inputs {
    watched: Option<WatchedDir>,
    watches: Option<Watches>,
    /// State directory, and the cluster whose listing is stored there; `None` = nothing is stored.
    stored: Option<(PathBuf, Origin)>,
    /// When the stored list is used. `None` if it must not be read, or was already read.
    stands_in: Option<Instant>,
}

impl Inputs {
    fn new(
        watched: Option<WatchedDir>,
        watches: Option<Watches>,
        stored: Option<(PathBuf, Origin)>,
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
            if let (Some(watches), Some((state, origin))) = (&self.watches, &self.stored)
                && let Some(stored) = read_stored(state, origin, uid.clone(), &watches.health).await
            {
                return Some(Wake::Stored(stored));
            }
        }
    }
}

/// The stored list, if there is one that can be used.
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

/// Returns at this time; never for `None`.
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
