//! The resolver's task: it follows the objects, and the agent that leads looks names up, makes,
//! writes and removes objects.

mod answers;
#[cfg(test)]
mod tests;

use std::{
    future::pending,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use agent_core::{name_objects::MAX_OBJECTS, source_event::SourceEvent};
use dns_policy::{name::Fqdn, wall_time};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub use self::answers::{NotRunning, Request, ResolverHandle};
use super::{
    ResolvedName, ResolverSettings, TrustedServers, WantedNames,
    ask::{self, Families},
    book::{self, Book, Write, Written},
    counters::{Counters, LookupResult, WriteResult},
    object::{AddressFilter, ObjectKey, Settings, UnixTime},
    observe::Outcome,
    queue::Observations,
    schedule::{self, MAX_PLANNED, NoServers},
    store::{Changes, Created, Observers, ResolverStore, Role, StoreError, StoreHealth, Updated},
};

/// Maximum number of look-ups at the same time.
const LOOK_UPS: usize = 16;
/// Maximum number of writes of objects at the same time.
const WRITES: usize = 16;
/// Maximum number of objects that the core gets at once: answers to pods wait while the core plans.
const OBJECTS: usize = 64;
/// Attempts to write a status while other agents write it.
const ATTEMPTS: u32 = 8;
/// Seconds until a write that failed is tried again.
const RETRY: u32 = 5;
/// Seconds until a write that the store refused is tried again.
const RETRY_REFUSED: u32 = 60;
/// Time for the last writes at the end.
const DRAIN: Duration = Duration::from_secs(2);

/// The ends of the channels between the task and the core.
#[derive(Debug)]
pub struct Ends {
    /// Answers of trusted servers to pods.
    pub observations: Observations,
    pub names: watch::Receiver<Arc<WantedNames>>,
    /// DNS servers that look-ups are sent to.
    pub servers: watch::Receiver<Arc<TrustedServers>>,
    /// Addresses of objects, for the core.
    pub resolved: mpsc::Sender<Vec<SourceEvent<ResolvedName>>>,
}

/// Starts the resolver on `store`. It ends at `stop`, after the last writes.
pub fn start<S: ResolverStore>(
    store: S,
    settings: &ResolverSettings,
    filter: AddressFilter,
    ends: Ends,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) -> ResolverHandle {
    let store = Arc::new(store);
    // The store lives on until the last writes are done.
    let store_stop = CancellationToken::new();
    let (role_sender, role) = watch::channel(Role::default());
    let (health_sender, health) = watch::channel(StoreHealth::default());
    let (change_sender, changes) = mpsc::channel(16);
    let (watched, ended) = (Arc::clone(&store), store_stop.clone());
    tasks.spawn(async move { watched.watch(change_sender, health_sender, ended).await });
    if settings.writes {
        let (led, ended) = (Arc::clone(&store), store_stop.clone());
        tasks.spawn(async move { led.lead(role_sender, ended).await });
    }
    let (requests, received) = mpsc::channel(16);
    let handle = ResolverHandle::new(requests);
    let families = Families {
        ipv4: filter.ipv4,
        ipv6: filter.ipv6,
    };
    let task = Task {
        store,
        writes: settings.writes,
        settings: settings.settings,
        families,
        book: Book::new(settings.settings, filter, &settings.namespace),
        counters: Arc::clone(handle.counters()),
        ends,
        role: Role::Follows,
        is_listed: false,
        replan: None,
        store_problem: None,
        left_out: 0,
        health,
        look_ups: JoinSet::new(),
        writing: JoinSet::new(),
        making: JoinSet::new(),
    };
    let stop = stop.clone();
    tasks.spawn(async move {
        task.run(changes, role, received, stop).await;
        store_stop.cancel();
    });
    handle
}

struct Task<S> {
    store: Arc<S>,
    /// Whether this agent writes objects; false with `--resolver consume`.
    writes: bool,
    settings: Settings,
    families: Families,
    book: Book,
    counters: Arc<Counters>,
    ends: Ends,
    role: Role,
    /// Whether the store has been read at least once.
    is_listed: bool,
    /// When the objects are compared with the wanted names.
    replan: Option<Instant>,
    /// Why the last write failed.
    store_problem: Option<String>,
    /// Number of names without an object, because there are too many names.
    left_out: usize,
    health: watch::Receiver<StoreHealth>,
    look_ups: JoinSet<(Fqdn, Result<Outcome, NoServers>)>,
    writing: JoinSet<(ObjectKey, Written, Option<StoreError>)>,
    making: JoinSet<Result<(), StoreError>>,
}

impl<S: ResolverStore> Task<S> {
    async fn run(
        mut self,
        mut changes: mpsc::Receiver<Changes>,
        mut role: watch::Receiver<Role>,
        mut requests: mpsc::Receiver<Request>,
        stop: CancellationToken,
    ) {
        let observations = self.ends.observations.clone();
        // In an agent that never writes, nothing changes the role.
        let mut has_role = self.writes;
        loop {
            self.work();
            if !self.send_resolved().await {
                return;
            }
            let next = self.next_work();
            tokio::select! {
                Some(changed) = changes.recv() => self.changed(changed),
                observed = observations.take() => {
                    for observation in observed {
                        self.observed(&observation);
                    }
                }
                changed = role.changed(), if has_role => {
                    has_role = changed.is_ok();
                    self.take_role(*role.borrow_and_update());
                }
                Ok(()) = self.ends.names.changed() => self.plan_now(),
                Ok(()) = self.ends.servers.changed() => {}
                Some(Ok((name, outcome))) = self.look_ups.join_next() => {
                    self.looked_up(&name, outcome);
                }
                Some(Ok((key, written, error))) = self.writing.join_next() => {
                    self.wrote(&key, written, error.as_ref());
                }
                Some(Ok(made)) = self.making.join_next() => self.made(made),
                Some(request) = requests.recv() => self.answer(request),
                () = at(next) => {}
                () = stop.cancelled() => break,
            }
        }
        for observation in observations.take_now() {
            self.observed(&observation);
        }
        let _late = timeout(DRAIN, self.drain()).await;
    }

    /// Writes the objects with changes that are not written yet.
    async fn drain(&mut self) {
        loop {
            // The last writes do not wait for the pause between two writes of an object.
            self.write(now().plus(book::PAUSE));
            match self.writing.join_next().await {
                Some(Ok((key, written, error))) => self.wrote(&key, written, error.as_ref()),
                Some(Err(_)) => {}
                None => return,
            }
        }
    }

    /// Starts all that is due.
    fn work(&mut self) {
        let now = now();
        if self.leads() {
            if self.replan.is_some_and(|at| at <= Instant::now()) {
                self.plan();
            }
            self.book.expire(now);
            self.look_up();
        }
        self.write(now);
    }

    fn leads(&self) -> bool {
        self.role != Role::Follows && self.is_listed
    }

    /// When [`Self::work`] has something to do without an event.
    fn next_work(&mut self) -> Option<Instant> {
        let mut times = Vec::new();
        if self.leads() {
            times.extend(self.replan);
            times.extend(self.book.expires().map(until));
            if self.look_ups.len() < LOOK_UPS {
                let due = self.book.schedule().next().map(|(at, _)| at);
                let remaining = due.map(|due| until(due).saturating_duration_since(Instant::now()));
                times.push(match remaining {
                    Some(Duration::ZERO) => Instant::now(),
                    remaining => Instant::now() + schedule::wait(remaining, &self.settings),
                });
            }
        }
        if self.writing.len() < WRITES && self.may_write() && self.is_listed {
            times.extend(self.book.retries().map(until));
        }
        times.into_iter().min()
    }

    fn may_write(&self) -> bool {
        self.writes && (self.role == Role::Leads || self.store.observers() == Observers::Every)
    }

    async fn send_resolved(&mut self) -> bool {
        let mut resolved = self.book.take_resolved().into_iter();
        loop {
            let some: Vec<_> = resolved.by_ref().take(OBJECTS).collect();
            if some.is_empty() {
                return true;
            }
            if self.ends.resolved.send(some).await.is_err() {
                return false;
            }
        }
    }

    fn changed(&mut self, changes: Changes) {
        self.is_listed |= changes.contains(&SourceEvent::InitDone);
        let has_others = self.book.has_others(&changes);
        self.book.changed(changes, now());
        // If only the status of an object was written, ten thousand objects need not be compared.
        if has_others {
            self.plan_now();
        }
    }

    fn take_role(&mut self, role: Role) {
        if let Some(change) = change_of_role(self.role, role) {
            tracing::info!("{change}");
        }
        if role == Role::LeadsInMemory {
            // The store's health has the reason.
            self.store_problem = None;
        }
        self.role = role;
        self.book.set_leads(role != Role::Follows);
        self.plan_now();
    }

    fn plan_now(&mut self) {
        self.replan = Some(Instant::now());
    }

    fn observed(&mut self, observation: &super::Observation) {
        if self.may_write() || self.role == Role::LeadsInMemory {
            self.book.observed(observation, now());
        }
    }

    /// Makes and removes objects, [`WRITES`] at a time.
    fn plan(&mut self) {
        self.replan = None;
        if !self.making.is_empty() {
            // When the last of these ends, the task plans again.
            return;
        }
        let wanted = Arc::clone(&self.ends.names.borrow_and_update());
        let plan = self.book.plan(&wanted, now());
        self.left_out = plan.left_out;
        if self.role != Role::Leads {
            return;
        }
        let deletes = plan.delete.iter().cloned().map(|key| (key, None));
        let creates = plan
            .create
            .iter()
            .cloned()
            .map(|(key, name)| (key, Some(name)));
        for (key, name) in deletes.chain(creates).take(WRITES) {
            let store = Arc::clone(&self.store);
            self.making.spawn(async move {
                match name {
                    None => store.delete(&key).await,
                    Some(name) => match store.create(&key, &name).await? {
                        Created::Done(_) => Ok(()),
                        Created::Exists => match store.get(&key).await? {
                            // The object is there, and the watch has not sent it yet.
                            Some(object) if object.name == name => Ok(()),
                            _ => Err(StoreError::Unavailable(format!(
                                "DNSNameResolver {key} cannot be made for {name}: an object or a file \
                                 of that name is there; remove it"
                            ))),
                        },
                    },
                }
            });
        }
    }

    fn made(&mut self, made: Result<(), StoreError>) {
        match made {
            Ok(()) => {
                self.store_problem = None;
                if self.making.is_empty() {
                    // The watch may not have sent the last objects yet: the task plans again soon, not at once.
                    self.replan = Some(Instant::now() + Duration::from_millis(100));
                }
            }
            Err(error) => {
                self.failed(&error);
                let after = Duration::from_secs(RETRY.into());
                self.replan = Some(Instant::now() + after);
            }
        }
    }

    fn look_up(&mut self) {
        let room = LOOK_UPS.saturating_sub(self.look_ups.len());
        let servers = Arc::clone(&self.ends.servers.borrow_and_update());
        for (name, known) in self.book.schedule().take_due(now(), room) {
            let chosen = schedule::servers_to_ask(known, &servers.backends, &mut rand::rng());
            let families = self.families;
            self.look_ups.spawn(async move {
                let outcome = match chosen {
                    Ok(servers) => Ok(ask::look_up(&name, &servers, families).await),
                    Err(none) => Err(none),
                };
                (name, outcome)
            });
        }
    }

    fn looked_up(&mut self, name: &Fqdn, outcome: Result<Outcome, NoServers>) {
        match outcome {
            Ok(outcome) => {
                self.counters.lookups.inc(LookupResult::from(&outcome));
                self.book.looked_up(name, &outcome, now());
            }
            // No server was asked, so this does not count as a failure of the name.
            Err(NoServers) => {
                self.counters.lookups.inc(LookupResult::NoServer);
                self.book.not_asked(name, now());
            }
        }
    }

    /// Writes the objects whose time has come.
    fn write(&mut self, now: UnixTime) {
        if !self.may_write() || !self.is_listed {
            return;
        }
        let room = WRITES.saturating_sub(self.writing.len());
        for write in self.book.take_writes(now, room) {
            let (store, counters) = (Arc::clone(&self.store), Arc::clone(&self.counters));
            let settings = self.settings;
            self.writing.spawn(async move {
                let (written, error) = match put(&*store, &write, &settings, &counters).await {
                    Ok(written) => (written, None),
                    Err(error) => {
                        counters.writes.inc(WriteResult::Failed);
                        let after = match error {
                            StoreError::Refused(_) => RETRY_REFUSED,
                            StoreError::Unavailable(_) => RETRY,
                        };
                        (Written::Failed(after), Some(error))
                    }
                };
                (write.key, written, error)
            });
        }
    }

    fn wrote(&mut self, key: &ObjectKey, written: Written, error: Option<&StoreError>) {
        match error {
            Some(error) => self.failed(error),
            None if matches!(written, Written::Done(_)) => self.store_problem = None,
            None => {}
        }
        self.book.wrote(key, written, now());
    }

    fn failed(&mut self, error: &StoreError) {
        let problem = format!(
            "DNSNameResolver objects cannot be written, so that other nodes and later runs do not have what this \
             one learned: {error}"
        );
        if self.store_problem.as_ref() != Some(&problem) {
            tracing::warn!("{problem}");
            self.store_problem = Some(problem);
        }
    }

    fn problems(&self) -> Vec<String> {
        let mut problems = self.health.borrow().problems.clone();
        problems.extend(self.store_problem.clone());
        if self.left_out > 0 {
            problems.push(format!(
                "{} names of EgressFirewalls are not looked up: there are {MAX_OBJECTS} DNSNameResolver objects; \
                 use wildcards, or remove rules",
                self.left_out
            ));
        }
        let unplanned = self.book.planned().left_out();
        if unplanned > 0 {
            problems.push(format!(
                "{unplanned} names that wildcards found are not looked up again: {MAX_PLANNED} names of \
                 DNSNameResolver objects are; use names in place of wildcards, or remove rules"
            ));
        }
        if self.leads()
            && !self.book.planned().is_empty()
            && self.ends.servers.borrow().backends.is_empty()
        {
            problems.push(format!(
                "names of EgressFirewalls are not looked up: {NoServers}"
            ));
        }
        problems
    }
}

/// The log's line about a change of role. An agent that does not lead does not know whether another one does.
fn change_of_role(before: Role, now: Role) -> Option<&'static str> {
    match (before != Role::Follows, now != Role::Follows) {
        (false, true) => Some("this agent looks up names of EgressFirewalls now"),
        (true, false) => Some("this agent no longer looks up names of EgressFirewalls"),
        _ => None,
    }
}

/// Writes the status of an object, and decides again if another agent wrote in between.
async fn put<S: ResolverStore>(
    store: &S,
    write: &Write,
    settings: &Settings,
    counters: &Counters,
) -> Result<Written, StoreError> {
    let mut object = write.base.clone();
    for attempt in 0..ATTEMPTS {
        let (status, left_out) = write.status(&object, now(), settings);
        counters.left_out(left_out);
        if status == object.status {
            return Ok(Written::Done(object));
        }
        let updated = store
            .update_status(&write.key, &object.version, &status)
            .await?;
        match updated {
            Updated::Done(version) => {
                counters.writes.inc(WriteResult::Written);
                (object.version, object.status) = (version, status);
                return Ok(Written::Done(object));
            }
            Updated::Gone => return Ok(Written::Gone),
            Updated::Conflict => counters.writes.inc(WriteResult::Conflict),
        }
        let longest = 10_u64 << attempt;
        sleep(Duration::from_millis(rand::random_range(0..longest))).await;
        object = match store.get(&write.key).await? {
            Some(object) if object.name == write.base.name => object,
            _ => return Ok(Written::Gone),
        };
    }
    Ok(Written::Failed(1))
}

fn now() -> UnixTime {
    UnixTime::from(wall_time::of_file())
}

/// The instant at which the wall clock will show a time, if no program sets it.
fn until(time: UnixTime) -> Instant {
    let time: SystemTime = UNIX_EPOCH + Duration::from_secs(time.0);
    let remaining = time
        .duration_since(wall_time::of_file())
        .unwrap_or_default();
    Instant::now() + remaining.min(schedule::LONGEST)
}

async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => pending().await,
    }
}

/// Servers that a command asks.
fn chosen(servers: &TrustedServers) -> Result<Vec<SocketAddr>, NoServers> {
    schedule::servers_to_ask(2, &servers.backends, &mut rand::rng())
}
