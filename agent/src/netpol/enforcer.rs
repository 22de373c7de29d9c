//! Makes the kernel's table match the state, and keeps it so.
//!
//! Each change of the first two rows is one batch; there are at most 20 per second:
//!
//! | when | what |
//! |---|---|
//! | the state changes | the steps of the pipeline |
//! | another program changed the table, a batch failed, this is the first | the table is compared, and replaced if it differs |
//! | every two seconds | settings of the node that keep packets from every rule |
//! | an interface or a route changes | ways to pods |

use std::{
    collections::BTreeSet,
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use agent_cluster::own_interfaces;
use agent_datapath::{
    nf_tables::{Connection, NftablesError, TableEvents},
    tracked::{self, Connection as Tracked},
};
use netpol::{
    explain::Opening,
    pipeline::Commit,
    policy::Protocol,
    render::{
        change::{Change, Step},
        nft::TABLE,
        ruleset::{Table, TableFamily},
    },
};
use parking_lot::Mutex;
use tokio::{task::spawn_blocking, time::sleep};
use tokio_util::sync::CancellationToken;

use super::{
    drops,
    metrics::{CommitOutcome, Counters},
    owners::{self, Owners},
    state::Shared,
    surroundings::Surroundings,
};
use crate::endpoint::link_events::LinkEvents;

/// Time between two batches.
const PACE: Duration = Duration::from_millis(50);
/// Time between two looks at the node's settings.
const TICK: Duration = Duration::from_secs(2);
/// First and longest time until a failed batch is tried again.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));
/// Time between two scans of tracked connections.
const SCANS: Duration = Duration::from_secs(1);

/// The kernel's side.
#[derive(Debug)]
pub(super) struct Kernel {
    pub(super) connection: Connection,
    pub(super) events: TableEvents,
    /// Why the kernel has no tables of family `bridge`.
    pub(super) lacks_frames: Option<String>,
}

impl Kernel {
    /// Opens the kernel's side in the network namespace of this thread.
    ///
    /// # Errors
    /// The kernel lacks a part of nf_tables, or the process a right.
    pub(super) fn open() -> Result<Self, NftablesError> {
        let mut connection = Connection::open()?;
        connection.probe(TableFamily::Inet)?;
        let lacks_frames = lacks_frames(&mut connection);
        let events = TableEvents::open(TABLE)?.by_others(connection.port());
        Ok(Self {
            connection,
            events,
            lacks_frames,
        })
    }
}

/// Why the kernel has no tables of family `bridge`; `None` if it has them.
pub(super) fn lacks_frames(connection: &mut Connection) -> Option<String> {
    let probed = connection.probe(TableFamily::Bridge);
    probed.err().map(|error| error.to_string())
}

/// The task that enforces.
pub(super) struct Enforcer {
    pub(super) shared: Arc<Shared>,
    pub(super) counters: Counters,
    pub(super) links: LinkEvents,
    pub(super) sets_bridge_sysctls: bool,
    pub(super) logs_drops: bool,
    pub(super) owners: Mutex<Owners>,
}

/// The work that is due.
#[derive(Debug)]
struct Due {
    /// Whether the kernel's table may differ from the state.
    comparison: bool,
    /// Whether another program may have changed the table.
    is_foreign: bool,
    ways: bool,
    /// When the next attempt after a failure is made, and the pause if that fails too.
    retry: Option<(Instant, Duration)>,
}

impl Due {
    /// Notes the result of an attempt.
    fn note(&mut self, done: &Done) {
        match done.result {
            Ok(_) => {
                self.comparison = done.cannot_compare;
                self.is_foreign &= done.cannot_compare;
                self.retry = None;
            }
            Err(_) => {
                self.comparison = true;
                let pause = self.retry.map(|(_, pause)| (pause * 2).min(RETRY.1));
                let pause = pause.unwrap_or(RETRY.0);
                self.retry = Some((Instant::now() + pause, pause));
            }
        }
    }
}

/// Connections that may have to end.
#[derive(Debug, Default)]
struct Over {
    /// Addresses that no pod of this node has any more.
    ended: BTreeSet<IpAddr>,
    /// Whether directions that were open may be closed now.
    is_closing: bool,
    /// Whether addresses may have other pods than the stored ones.
    has_other_pods: bool,
    scanned: Option<Instant>,
}

impl Enforcer {
    /// Runs until stopped. The table stays.
    pub(super) async fn run(self, kernel: Kernel, stop: CancellationToken) {
        let Kernel {
            connection,
            events,
            lacks_frames,
        } = kernel;
        self.shared.state.lock().lacks_frames = lacks_frames;
        let connection = Arc::new(Mutex::new(connection));
        let mut due = Due {
            comparison: true,
            is_foreign: false,
            ways: true,
            retry: None,
        };
        let mut over = Over::default();
        let mut tick = tokio::time::interval(TICK);
        loop {
            tokio::select! {
                () = self.shared.changed.notified() => {}
                () = self.links.changed() => due.ways = true,
                changed = events.changed() => {
                    due.is_foreign = true;
                    due.comparison = true;
                    if let Err(error) = changed {
                        tracing::warn!(%error, "cannot receive changes of the nftables table; it is compared every two seconds");
                        sleep(TICK).await;
                    }
                }
                _ = tick.tick() => {
                    self.look_around().await;
                    due.comparison |= self.has_frames_now(&connection).await;
                }
                () = stop.cancelled() => return,
            }
            self.shared.state.lock().force.beat = Instant::now();
            let may_try = due.retry.is_none_or(|(at, _)| at <= Instant::now());
            if may_try && self.shared.state.lock().is_known() {
                self.enforce(&connection, &mut due, &mut over).await;
                self.end_connections(&mut over).await;
                self.store_owners(&mut over);
                sleep(PACE).await;
            }
        }
    }

    /// Looks at the node's settings.
    async fn look_around(&self) {
        let bridging = self.shared.state.lock().ways.bridging();
        let may_set = self.sets_bridge_sysctls;
        let looked = spawn_blocking(move || Surroundings::look(bridging, may_set)).await;
        if let Ok(now) = looked {
            let before = std::mem::replace(&mut self.shared.state.lock().surroundings, now.clone());
            let new = now.problems.iter();
            for problem in new.filter(|problem| !before.problems.contains(problem)) {
                tracing::error!("{problem}");
            }
        }
    }

    /// Whether the kernel has tables of family `bridge` that it lacked, as after a module was loaded.
    async fn has_frames_now(&self, connection: &Arc<Mutex<Connection>>) -> bool {
        if self.shared.state.lock().open_to_frames().is_none() {
            return false;
        }
        let connection = Arc::clone(connection);
        let probed = spawn_blocking(move || lacks_frames(&mut connection.lock())).await;
        let has_now = matches!(probed, Ok(None));
        if has_now {
            self.shared.state.lock().lacks_frames = None;
        }
        has_now
    }

    /// Looks at the ways to the pods, and makes the changes of the state. The first table must have these ways,
    /// because it is compared with the table of the last run.
    async fn enforce(&self, connection: &Arc<Mutex<Connection>>, due: &mut Due, over: &mut Over) {
        if due.comparison
            && let Ok(commit) = self.shared.state.lock().commit()
        {
            over.note(&commit);
        }
        if !self.owners.lock().is_compared() {
            let owners = self.shared.state.lock().owners();
            let of_former_pods = self.owners.lock().take_changed(&owners);
            over.ended.extend(of_former_pods);
        }
        self.look_at_ways(due).await;
        let (shared, connection) = (Arc::clone(&self.shared), Arc::clone(connection));
        let attempt = Attempt {
            compares: due.comparison,
            is_foreign: due.is_foreign,
            logs_drops: self.logs_drops,
        };
        let work = move || attempt.make(&shared, &mut connection.lock());
        let Ok(done) = spawn_blocking(work).await else {
            tracing::error!("a change of the table panicked (a bug); the table in force remains");
            due.comparison = true;
            return;
        };
        if let Some(commit) = &done.commit {
            over.note(commit);
        }
        over.is_closing |= done.is_replaced;
        due.note(&done);
        self.note(done);
    }

    /// Counts an attempt, and shows its result.
    fn note(&self, done: Done) {
        let outcome = match (&done.result, &done.refused) {
            (Err(_), _) | (_, Some(_)) => Some(CommitOutcome::Failed),
            (Ok(outcome), None) => *outcome,
        };
        if let Some(outcome) = outcome {
            self.counters.outcomes.inc(outcome);
        }
        if let Some(took) = done.took {
            self.counters.observe(took);
        }
        let mut state = self.shared.state.lock();
        let failing = done.result.err().or(done.refused);
        match &failing {
            Some(reason) if state.force.failing != failing => tracing::error!(
                reason,
                "the table is not as the policies say; the last one remains in force"
            ),
            Some(_) => {}
            None => {
                state.force.is_begun = true;
                if let Some(generation) = done.generation {
                    state.force.accepted = generation;
                }
                let changed = done.elements.map(|elements| (Instant::now(), elements));
                state.force.changed = changed.or(state.force.changed);
            }
        }
        state.force.failing = failing;
        if !state.ways.are_of(&state.addresses()) {
            self.shared.changed.notify_one();
        }
    }

    /// Asks for the ways to the addresses of this node's pods, if one of the ways may have changed.
    async fn look_at_ways(&self, due: &mut Due) {
        let (mut ways, addresses) = {
            let state = self.shared.state.lock();
            (state.ways.clone(), state.addresses())
        };
        if !std::mem::take(&mut due.ways) && ways.are_of(&addresses) {
            return;
        }
        let before = ways.clone();
        if ways.look(&addresses).await.is_err() {
            due.ways = true;
        }
        if ways != before {
            let is_first_bridge = ways.bridging().is_some() && before.bridging().is_none();
            self.shared.state.lock().set_ways(ways);
            if is_first_bridge {
                self.look_around().await;
            }
        }
    }

    /// Stores the pods of all addresses, once the connections of former ones are deleted.
    fn store_owners(&self, over: &mut Over) {
        if !over.ended.is_empty() || !std::mem::take(&mut over.has_other_pods) {
            return;
        }
        let owners = self.shared.state.lock().owners();
        let stored = tokio::task::block_in_place(|| self.owners.lock().store(owners));
        over.has_other_pods = stored.is_err();
        let problem = stored.err().as_ref().map(owners::unstored);
        let before = std::mem::replace(&mut self.shared.state.lock().unstored, problem.clone());
        if let Some(problem) = problem.filter(|problem| before.as_ref() != Some(problem)) {
            tracing::warn!("{problem}");
        }
    }

    /// Deletes connections that no policy would let in now.
    async fn end_connections(&self, over: &mut Over) {
        over.ended.extend(&self.shared.state.lock().freed);
        let is_due = over.is_closing || !over.ended.is_empty();
        let is_soon = over.scanned.is_some_and(|at| at.elapsed() < SCANS);
        if !is_due || is_soon {
            if is_due {
                // The next tick, at the latest.
                self.shared.changed.notify_one();
            }
            return;
        }
        over.scanned = Some(Instant::now());
        over.is_closing = false;
        let ended = std::mem::take(&mut over.ended);
        let shared = Arc::clone(&self.shared);
        let again = ended.clone();
        let scanned = spawn_blocking(move || {
            let own = own_interfaces::list()?.addresses;
            tracked::delete(|connection| is_over(&shared, &own, &ended, connection))
        });
        let scanned = scanned.await;
        if matches!(scanned, Ok(Ok(_))) {
            let freed = &mut self.shared.state.lock().freed;
            freed.retain(|address| !again.contains(address));
        }
        match scanned {
            Ok(Ok(0)) => {}
            Ok(Ok(deleted)) => {
                tracing::debug!(
                    deleted,
                    "tracked connections were deleted, which no policy lets in"
                );
                self.counters
                    .ended_connections
                    .inc_by(u64::try_from(deleted).unwrap_or(0));
            }
            Ok(Err(error)) => {
                tracing::warn!(%error, "cannot delete tracked connections; answers in connections that policy closed pass until they end; tried again");
                over.ended.extend(again);
                over.is_closing = true;
            }
            Err(_) => tracing::error!("the scan of tracked connections panicked (a bug)"),
        }
    }
}

impl Over {
    fn note(&mut self, commit: &Commit) {
        self.ended.extend(commit.ended.iter().copied());
        self.has_other_pods |= commit.has_other_pods;
        self.is_closing |= !commit.closed.is_empty() || may_close(&commit.change);
    }
}

/// Whether a connection has to end: one of its ends is no pod of this node any more, or no policy would let it in
/// now, in either direction. While conntrack has the entry, packets of the first direction are judged and dropped,
/// and the receiver's packets pass as answers. Without the entry, packets of both directions are dropped: datagrams
/// are judged as the first of a connection, and TCP segments open none.
///
/// If the receiver may open a connection to the sender, the entry stays. Without the entry, the receiver's next
/// datagram would make a new one, and the sender's datagrams would pass as answers. A TCP connection goes on if the
/// policy opens it again soon.
///
/// `own` are the node's addresses, about which policy says nothing.
fn is_over(
    shared: &Shared,
    own: &BTreeSet<IpAddr>,
    ended: &BTreeSet<IpAddr>,
    connection: &Tracked,
) -> bool {
    let ends = [connection.source, connection.destination];
    if ends.iter().any(|end| ended.contains(end)) {
        return true;
    }
    if ends.iter().any(|end| own.contains(end)) {
        return false;
    }
    let protocol = Protocol::from_number(connection.protocol);
    let is_closed = |from, to, port| {
        let port = protocol.zip(port);
        let sides = shared
            .state
            .lock()
            .pipeline
            .explain(&Opening { from, to, port });
        sides.iter().any(|side| side.allowed_by.is_none())
    };
    let (from, to) = (connection.source, connection.destination);
    is_closed(from, to, connection.port) && is_closed(to, from, connection.source_port)
}

/// The result of one attempt.
struct Done {
    /// What the kernel did, if anything, or why the attempt failed.
    result: Result<Option<CommitOutcome>, String>,
    /// How long the kernel took for a batch.
    took: Option<Duration>,
    /// Elements that a batch changed.
    elements: Option<usize>,
    /// What the pipeline changed.
    commit: Option<Commit>,
    /// Whether the whole table was made again.
    is_replaced: bool,
    /// Why the policies need a table that is too large.
    refused: Option<String>,
    /// Whether the table could not be compared, because the kernel accepted no table of this run yet.
    cannot_compare: bool,
    /// Number of changes of the state that the kernel's table includes.
    generation: Option<u64>,
}

/// How the next attempt is made.
#[derive(Clone, Copy, Debug)]
struct Attempt {
    /// Whether the kernel's table is compared, not only changed.
    compares: bool,
    /// Whether another program may have changed the table.
    is_foreign: bool,
    logs_drops: bool,
}

impl Attempt {
    /// Makes the changes of the state since the last attempt.
    fn make(self, shared: &Shared, kernel: &mut Connection) -> Done {
        let (committed, tables, has_frames, generation) = {
            let mut state = shared.state.lock();
            let committed = state.commit();
            if state.are_exports_due() {
                shared.exports_due.notify_one();
            }
            // Until a table of this run is accepted, that of the last run stays.
            let compares = self.compares && state.pipeline.has_committed();
            let tables = compares.then(|| state.tables());
            let has_frames = state.lacks_frames.is_none();
            (committed, tables, has_frames, state.generation)
        };
        let mut done = Done {
            result: Ok(None),
            took: None,
            elements: None,
            commit: None,
            is_replaced: false,
            refused: None,
            cannot_compare: self.compares && tables.is_none(),
            generation: (!self.compares || tables.is_some()).then_some(generation),
        };
        match committed {
            Ok(commit) => {
                if tables.is_none() {
                    let change = commit.change.clone();
                    let mut changes = vec![match self.logs_drops {
                        true => change.logging(drops::GROUP),
                        false => change,
                    }];
                    changes.extend(has_frames.then(|| commit.frames.clone()));
                    changes.retain(|change| !change.is_empty());
                    if !changes.is_empty() {
                        write(kernel, &changes, CommitOutcome::Changed, &mut done);
                    }
                }
                done.commit = Some(commit);
            }
            Err(too_large) => done.refused = Some(too_large.to_string()),
        }
        if let Some(tables) = tables {
            let tables = drops::logged(tables, self.logs_drops);
            self.compare(kernel, &tables, &mut done);
        }
        done
    }

    /// Replaces the kernel's tables that differ from `tables`, all in one batch.
    fn compare(self, kernel: &mut Connection, tables: &[Table], done: &mut Done) {
        let mut replacements = Vec::new();
        for table in tables {
            match kernel.difference(table) {
                Ok(None) => {}
                Ok(Some(difference)) => {
                    if self.is_foreign {
                        let family = table.family;
                        tracing::warn!(%family, %difference, "another program changed the nftables table; it is made again");
                    }
                    replacements.push(Change::replacement(table));
                }
                Err(error) => {
                    done.result = Err(error.to_string());
                    return;
                }
            }
        }
        if replacements.is_empty() {
            return;
        }
        let outcome = match self.is_foreign {
            true => CommitOutcome::Repaired,
            false => CommitOutcome::Changed,
        };
        done.is_replaced = true;
        write(kernel, &replacements, outcome, done);
    }
}

fn write(kernel: &mut Connection, changes: &[Change], outcome: CommitOutcome, done: &mut Done) {
    let begin = Instant::now();
    match kernel.commit(changes) {
        Ok(()) => {
            done.result = Ok(Some(outcome));
            done.took = Some(begin.elapsed());
            done.elements = Some(changes.iter().map(Change::elements).sum());
        }
        Err(error) => done.result = Err(error.to_string()),
    }
}

/// Whether a change may close a direction that was open.
fn may_close(change: &Change) -> bool {
    let mut steps = change.steps.iter();
    steps.any(|step| {
        matches!(
            step,
            Step::DeleteElements(..) | Step::DeleteVerdicts(..) | Step::AddVerdicts(..)
        )
    })
}
