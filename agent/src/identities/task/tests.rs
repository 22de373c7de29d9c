//! The task with an API server in memory, in a time that the test sets: many agents at once, and refusals.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::{AtomicU64, Ordering},
};

use agent_core::identity::cluster::{IdentityRange, WantedIdentity, candidates};
use parking_lot::Mutex;
use serde_json::Value;
use shared_maps::IdentityId;
use tokio::{sync::oneshot, task::yield_now};

use super::*;
use crate::runner;

/// Gives the answer to one attempt, by the agent's number and the labels; `None` = the server works.
type Fault = Box<dyn Fn(usize, &LabelSet, Duration) -> Option<u16> + Send + Sync>;

/// A clock that advances only when every task waits for it.
struct Clock {
    begin: Instant,
    passed: Mutex<Duration>,
    sleepers: Mutex<BTreeMap<(Duration, u64), oneshot::Sender<()>>>,
    /// How often a task looked at it.
    looks: AtomicU64,
}

impl Clock {
    fn new() -> Self {
        Self {
            begin: Instant::now(),
            passed: Mutex::default(),
            sleepers: Mutex::default(),
            looks: AtomicU64::default(),
        }
    }

    fn passed(&self) -> Duration {
        self.looks.fetch_add(1, Ordering::Relaxed);
        *self.passed.lock()
    }

    async fn sleep_until(&self, at: Duration) {
        let number = self.looks.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = oneshot::channel();
        self.sleepers.lock().insert((at, number), sender);
        let _gone = receiver.await;
    }

    /// Waits until every task of this thread waits for the clock.
    async fn settle(&self) {
        let mut quiet = 0;
        while quiet < 16 {
            let before = self.looks.load(Ordering::Relaxed);
            yield_now().await;
            let is_quiet = self.looks.load(Ordering::Relaxed) == before;
            quiet = if is_quiet { quiet + 1 } else { 0 };
        }
    }

    /// Lets the time pass until then, from one sleeper to the next.
    async fn run_until(&self, end: Duration) {
        loop {
            self.settle().await;
            let mut sleepers = self.sleepers.lock();
            let next = sleepers.first_key_value().map(|((at, _), _)| *at);
            let Some(next) = next.filter(|next| *next <= end) else {
                break;
            };
            let later = sleepers.split_off(&(next, u64::MAX));
            let due = std::mem::replace(&mut *sleepers, later);
            drop(sleepers);
            let mut passed = self.passed.lock();
            *passed = next.max(*passed);
            drop(passed);
            for sleeper in due.into_values() {
                let _gone = sleeper.send(());
            }
        }
        *self.passed.lock() = end;
    }
}

struct Server {
    clock: Clock,
    fault: Fault,
    objects: Mutex<BTreeMap<IdentityId, LabelSet>>,
    /// How many objects were made.
    made: AtomicU64,
    /// The time of each attempt, and the agent's number.
    attempts: Mutex<Vec<(Duration, usize)>>,
    /// The number that an agent received for a label set.
    told: Mutex<BTreeMap<(usize, LabelSet), IdentityId>>,
}

/// The server, as one agent sees it.
struct Client {
    agent: usize,
    server: Arc<Server>,
}

impl Server {
    fn new(fault: Fault) -> Arc<Self> {
        Arc::new(Self {
            clock: Clock::new(),
            fault,
            objects: Mutex::default(),
            made: AtomicU64::default(),
            attempts: Mutex::default(),
            told: Mutex::default(),
        })
    }

    /// Puts an object that another writer made.
    fn put(&self, id: IdentityId, labels: &LabelSet) {
        self.objects.lock().insert(id, labels.clone());
    }

    fn of_agent(&self, agent: usize) -> Vec<Duration> {
        let attempts = self.attempts.lock();
        let of_agent = attempts.iter().filter(|(_, of)| *of == agent);
        of_agent.map(|(at, _)| *at).collect()
    }
}

impl Store for Client {
    fn now(&self) -> Instant {
        let clock = &self.server.clock;
        clock.begin + clock.passed()
    }

    async fn sleep_until(&self, at: Instant) {
        let clock = &self.server.clock;
        let at = at.saturating_duration_since(clock.begin);
        clock.sleep_until(at).await;
    }

    fn namespace(&self) -> &str {
        "kube-system"
    }

    async fn make(
        &self,
        id: IdentityId,
        labels: &LabelSet,
        _is_of_pod: bool,
    ) -> Result<Made, RequestError> {
        let server = &self.server;
        let at = server.clock.passed();
        server.attempts.lock().push((at, self.agent));
        let answer = Duration::from_millis(1) + random(Duration::from_millis(20));
        server.clock.sleep_until(at + answer).await;
        let fault = (server.fault)(self.agent, labels, at);
        if let Some(code) = fault.filter(|code| *code != LOST) {
            let message = "as the test says".to_owned();
            return Err(RequestError::Refused { code, message });
        }
        let made = match server.objects.lock().entry(id) {
            std::collections::btree_map::Entry::Vacant(free) => {
                free.insert(labels.clone());
                server.made.fetch_add(1, Ordering::Relaxed);
                Made::Created
            }
            std::collections::btree_map::Entry::Occupied(known) if known.get() == labels => {
                Made::Found
            }
            std::collections::btree_map::Entry::Occupied(_) => Made::Others,
        };
        if fault.is_some() {
            return Err(RequestError::Unreachable("the answer is lost".to_owned()));
        }
        if made != Made::Others {
            server.told.lock().insert((self.agent, labels.clone()), id);
        }
        Ok(made)
    }

    async fn lease(&self, _: &str, _: &str) -> Result<Option<Value>, RequestError> {
        Ok(None)
    }
}

/// In place of a status: the server did it, and the answer is lost.
const LOST: u16 = 0;

fn set(namespace: &str, app: &str) -> LabelSet {
    LabelSet::parse(&[
        &format!("k8s:app={app}"),
        &format!("k8s:io.kubernetes.pod.namespace={namespace}"),
    ])
    .unwrap()
}

fn wanted(sets: &[LabelSet], range: IdentityRange) -> WantedIdentities {
    let identity = |labels: &LabelSet| {
        let mut seen = BTreeSet::new();
        let choices = candidates(labels, range).filter(|id| seen.insert(*id));
        WantedIdentity {
            choices: choices.collect(),
            is_of_pod: true,
            vanished: false,
            is_beyond_share: false,
        }
    };
    let sets = sets.iter();
    sets.map(|labels| (labels.clone(), identity(labels)))
        .collect()
}

/// An agent whose pods have these label sets.
fn start(
    server: &Arc<Server>,
    agent: usize,
    list: &watch::Sender<Arc<WantedIdentities>>,
    tasks: &TaskTracker,
) -> Identities {
    let shared = Identities::default();
    // There is no core that takes the numbers. The server records the numbers that it gave.
    let (core, inbox) = runner::channel();
    let maker = Maker {
        objects: Client {
            agent,
            server: Arc::clone(server),
        },
        core,
        shared: shared.clone(),
        own: list.subscribe(),
        others: watch::Sender::default().subscribe(),
        queue: Queue::default(),
        backoff: Backoff::between(PAUSES),
        operator: OperatorSight::new(),
        obstacles: Obstacles::default(),
        is_beside_operator: false,
        resting_at: Some(server.clock.begin),
    };
    tasks.spawn(async move {
        let _inbox = inbox;
        maker.run().await;
    });
    shared
}

#[tokio::test]
async fn a_thousand_agents_at_once_make_one_object_for_each_label_set() {
    const AGENTS: usize = 1000;
    const OUTAGE: Duration = Duration::from_secs(10);
    // The first answers are lost, then the server is overloaded, and then it works.
    let fault: Fault = Box::new(|agent, _, at| match at {
        _ if at < Duration::from_millis(10) && agent % 3 == 0 => Some(LOST),
        _ if at < OUTAGE => Some(503),
        _ => None,
    });
    let server = Server::new(fault);
    // Several label sets have the same first candidates.
    let range: IdentityRange = "300-340".parse().unwrap();
    let sets: Vec<LabelSet> = (0..20)
        .map(|n| set(&format!("ns-{}", n % 4), &n.to_string()))
        .collect();
    let list = watch::Sender::new(Arc::new(wanted(&sets, range)));
    let tasks = TaskTracker::new();
    let agents: Vec<Identities> = (0..AGENTS)
        .map(|agent| start(&server, agent, &list, &tasks))
        .collect();
    server.clock.run_until(Duration::from_secs(50)).await;

    // One number for each label set, at every agent, and no number with two meanings.
    let made = server.made.load(Ordering::Relaxed);
    let objects = server.objects.lock().clone();
    assert_eq!((made, objects.len()), (20, 20));
    let labels: BTreeSet<&LabelSet> = objects.values().collect();
    assert_eq!(labels.len(), 20);
    let told = server.told.lock().clone();
    assert_eq!(told.len(), AGENTS * 20);
    for ((agent, labels), id) in &told {
        assert_eq!(objects.get(id), Some(labels), "agent {agent}");
    }
    assert!(agents.iter().all(|agent| agent.view().problem.is_none()));

    // While the server was away, each agent tried less and less often.
    let most = (0..AGENTS).map(|agent| {
        let attempts = server.of_agent(agent);
        attempts.iter().filter(|at| **at < OUTAGE).count()
    });
    let most = most.max().unwrap();
    assert!((3..=8).contains(&most), "{most} attempts in the outage");
    // At no time do all come together, neither at first nor when the server is back.
    let attempts = server.attempts.lock();
    let within = |from: Duration, long: Duration| {
        let within = attempts
            .iter()
            .filter(|(at, _)| *at >= from && *at < from + long);
        within
            .map(|(_, agent)| agent)
            .collect::<BTreeSet<_>>()
            .len()
    };
    for ms in 0..100 {
        let at_once = within(Duration::from_millis(ms), Duration::from_millis(2));
        assert!(at_once < AGENTS / 4, "{at_once} agents at {ms} ms");
    }
    drop(attempts);
    let back = (0..AGENTS).filter_map(|agent| {
        let attempts = server.of_agent(agent);
        attempts.into_iter().find(|at| *at >= OUTAGE)
    });
    let mut back: Vec<Duration> = back.collect();
    back.sort_unstable();
    assert_eq!(back.len(), AGENTS);
    // A quarter of them comes within no less than 100 ms.
    for few in back.windows(AGENTS / 4) {
        let took = few[few.len() - 1] - few[0];
        assert!(
            took > Duration::from_millis(100),
            "{:?} and {took:?}",
            few[0]
        );
    }
}

#[tokio::test]
async fn labels_that_the_api_server_does_not_take_hold_up_no_other_tenant() {
    // 422: for example a value that its definition does not admit.
    let fault: Fault = Box::new(|_, labels, _| (labels.namespace() == Some("bad")).then_some(422));
    let server = Server::new(fault);
    let bad: Vec<LabelSet> = (0..30).map(|n| set("bad", &n.to_string())).collect();
    let range = IdentityRange::default();
    let list = watch::Sender::new(Arc::new(wanted(&bad, range)));
    let tasks = TaskTracker::new();
    let agent = start(&server, 0, &list, &tasks);
    // The pauses of the namespace are long already.
    server.clock.run_until(Duration::from_secs(20)).await;
    let before = server.of_agent(0).len();
    assert!((3..=10).contains(&before), "{before} attempts");
    let problem = agent.view().problem.unwrap();
    assert!(problem.contains("422"), "{problem}");
    let good = set("good", "web");
    let mut all = bad.clone();
    all.push(good.clone());
    list.send_replace(Arc::new(wanted(&all, range)));
    server.clock.run_until(Duration::from_millis(20_200)).await;
    assert!(server.told.lock().contains_key(&(0, good)));
    server.clock.run_until(Duration::from_secs(50)).await;
}

#[tokio::test]
async fn refusals_of_every_kind_are_tried_again_and_end() {
    for code in [401, 403, 404, 429, 500, 503] {
        let fault: Fault = Box::new(move |_, _, at| (at < Duration::from_secs(5)).then_some(code));
        let server = Server::new(fault);
        let web = set("shop", "web");
        let list = watch::Sender::new(Arc::new(wanted(
            std::slice::from_ref(&web),
            IdentityRange::default(),
        )));
        let tasks = TaskTracker::new();
        let agent = start(&server, 0, &list, &tasks);
        server.clock.run_until(Duration::from_secs(4)).await;
        let problem = agent.view().problem.unwrap();
        assert!(problem.contains(&code.to_string()), "{problem}");
        server.clock.run_until(Duration::from_secs(50)).await;
        assert!(server.told.lock().contains_key(&(0, web)), "{code}");
        assert_eq!(agent.view().problem, None, "{code}");
        assert_eq!(agent.creates().get(Outcome::Created), 1, "{code}");
    }
}

#[tokio::test]
async fn other_labels_under_every_wanted_number_are_named_with_the_remedy() {
    let server = Server::new(Box::new(|_, _, _| None));
    let range: IdentityRange = "300-303".parse().unwrap();
    for number in 300..303 {
        server.put(IdentityId(number), &set("shop", &number.to_string()));
    }
    let [web, db] = ["web", "db"].map(|app| set("shop", app));
    let list = watch::Sender::new(Arc::new(wanted(std::slice::from_ref(&web), range)));
    let tasks = TaskTracker::new();
    let agent = start(&server, 0, &list, &tasks);
    server.clock.run_until(Duration::from_secs(2)).await;
    assert_eq!(
        server.told.lock().get(&(0, web.clone())),
        Some(&IdentityId(303)),
        "the candidate that is free"
    );
    list.send_replace(Arc::new(wanted(&[web, db.clone()], range)));
    server.clock.run_until(Duration::from_secs(4)).await;
    let problem = agent.view().problem.unwrap();
    for part in [
        "k8s:app=db",
        "other labels have every number",
        "--identity-range",
    ] {
        assert!(problem.contains(part), "no {part:?} in {problem}");
    }
    let before = server.attempts.lock().len();
    server.clock.run_until(Duration::from_secs(24)).await;
    assert_eq!(
        server.attempts.lock().len(),
        before,
        "not again within a minute"
    );
    server.clock.run_until(Duration::from_secs(50)).await;
    assert!(!server.told.lock().contains_key(&(0, db)));
}

#[tokio::test]
async fn a_namespace_beyond_its_share_gets_no_object_and_is_named() {
    let server = Server::new(Box::new(|_, _, _| None));
    let [web, db] = [set("greedy", "web"), set("shop", "db")];
    let mut both = wanted(&[web.clone(), db.clone()], IdentityRange::default());
    let greedy = both.get_mut(&web).unwrap();
    (greedy.is_beyond_share, greedy.choices) = (true, Vec::new());
    let list = watch::Sender::new(Arc::new(both));
    let tasks = TaskTracker::new();
    let agent = start(&server, 0, &list, &tasks);
    server.clock.run_until(Duration::from_secs(2)).await;
    let told: Vec<LabelSet> = server
        .told
        .lock()
        .keys()
        .map(|(_, set)| set.clone())
        .collect();
    assert_eq!(told, [db]);
    assert_eq!(agent.creates().get(Outcome::Full), 1);
    // The success of another label set does not hide it.
    let problem = agent.view().problem.unwrap();
    assert!(problem.contains("namespace greedy"), "{problem}");
    server.clock.run_until(Duration::from_secs(50)).await;
}
