//! The task on scripted stores and on files.

mod memory;

use std::{net::IpAddr, time::SystemTime};

use polling::until_awaited;

use self::memory::{Conflicting, Memory};
use super::*;
use crate::resolver::{
    Observation, Place,
    object::Resolver,
    store::file::FileStore,
    view::{ObjectView, ResolverView},
};

const NAMESPACE: &str = "n";

/// The resolver of one agent, with the channels that its core would use.
struct Agent {
    handle: ResolverHandle,
    observations: Observations,
    names: watch::Sender<Arc<WantedNames>>,
    _servers: watch::Sender<Arc<TrustedServers>>,
    resolved: mpsc::Receiver<Vec<SourceEvent<ResolvedName>>>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl Agent {
    fn start(store: impl ResolverStore, wanted: &[&str]) -> Self {
        Self::start_with(store, all_of(wanted))
    }

    fn start_with(store: impl ResolverStore, wanted: WantedNames) -> Self {
        let observations = Observations::default();
        let (names, names_end) = watch::channel(Arc::new(wanted));
        let (servers, servers_end) = watch::channel(Arc::default());
        let (resolved_end, resolved) = mpsc::channel(1000);
        let ends = Ends {
            observations: observations.clone(),
            names: names_end,
            servers: servers_end,
            resolved: resolved_end,
        };
        let settings = ResolverSettings {
            place: Place::Kubernetes,
            writes: true,
            namespace: NAMESPACE.to_owned(),
            lease: Duration::from_secs(15),
            settings: Settings::default(),
        };
        let filter = AddressFilter {
            ipv4: true,
            ipv6: true,
            left_out: Vec::new(),
        };
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        Self {
            handle: super::start(store, &settings, filter, ends, &tasks, &stop),
            observations,
            names,
            _servers: servers,
            resolved,
            tasks,
            stop,
        }
    }

    fn observe(&self, name: &str, address: [u8; 4]) {
        self.observations.push(Observation {
            name: Fqdn::normalise(name),
            addresses: vec![address.into()],
            ttl: Duration::from_secs(300),
            at: wall_time::of_file(),
        });
    }

    async fn state(&self) -> ResolverView {
        self.handle.state().await.unwrap()
    }

    async fn has_objects(&self, count: usize) {
        until_awaited(
            "the objects",
            async || self.handle.objects().await,
            |objects| objects.as_ref().is_ok_and(|objects| objects.len() == count),
        )
        .await
        .unwrap();
    }

    async fn ends(self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    fn written(&self, result: WriteResult) -> u64 {
        self.handle.counters().writes.get(result)
    }
}

/// All names that firewalls use.
fn all_of(names: &[&str]) -> WantedNames {
    WantedNames {
        names: names.iter().map(|name| Fqdn::normalise(name)).collect(),
        is_complete: true,
    }
}

fn addresses(objects: &[Resolver]) -> Vec<IpAddr> {
    let names = objects.iter().flat_map(|object| &object.status.names);
    let addresses = names.flat_map(|name| &name.addresses);
    let mut all: Vec<IpAddr> = addresses.map(|address| address.ip).collect();
    all.sort();
    all.dedup();
    all
}

fn expected() -> Vec<IpAddr> {
    (0..200).map(|n| IpAddr::from([198, 51, 100, n])).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_answers_at_two_agents_reach_the_store_although_writes_conflict() {
    let memory = Memory::default();
    let first = Agent::start(
        Conflicting::new(memory.clone()),
        &["*.example.com", "www.example.org"],
    );
    until_awaited(
        "a leader",
        async || first.state().await.role,
        |role| role == "leads",
    )
    .await;
    first.has_objects(2).await;
    let second = Agent::start(
        Conflicting::new(memory.clone()),
        &["*.example.com", "www.example.org"],
    );
    second.has_objects(2).await;
    assert_eq!(second.state().await.role, "follows");
    let mut pushes = Vec::new();
    for (n, agent) in (0..200_u8).zip([&first, &second].into_iter().cycle()) {
        let name = match n % 4 {
            0 | 1 => "www.example.org".to_owned(),
            n => format!("sub{n}.example.com"),
        };
        let observations = agent.observations.clone();
        pushes.push((observations, name, [198, 51, 100, n]));
    }
    let all = pushes
        .into_iter()
        .map(|(observations, name, address)| async move {
            tokio::task::yield_now().await;
            observations.push(Observation {
                name: Fqdn::normalise(&name),
                addresses: vec![address.into()],
                ttl: Duration::from_secs(300),
                at: wall_time::of_file(),
            });
        });
    let mut pushing = JoinSet::new();
    all.for_each(|push| {
        pushing.spawn(push);
    });
    pushing.join_all().await;
    let store = memory.clone();
    until_awaited(
        "all answers in the store",
        async || addresses(&store.objects()),
        |all| expected().iter().all(|address| all.contains(address)),
    )
    .await;
    let conflicts = first.written(WriteResult::Conflict) + second.written(WriteResult::Conflict);
    assert!(conflicts > 0, "no write met another one");
    // Each agent has the addresses that the store has.
    for agent in [&first, &second] {
        // The last write may still be under way, so both sides are read each time.
        let seen = async || {
            let objects = agent.handle.objects().await.unwrap_or_default();
            let there = memory.objects();
            let there: usize = there.iter().map(|object| object.status.count()).sum();
            (count_addresses(&objects), there)
        };
        until_awaited(
            "the store's addresses at each agent",
            seen,
            |(known, there)| known == there,
        )
        .await;
    }
    let before = memory.writes();
    for n in 0..200 {
        first.observe("www.example.org", [198, 51, 100, n - n % 4]);
    }
    until_awaited(
        "the answers are taken",
        async || first.state().await.queued,
        |queued| *queued == 0,
    )
    .await;
    assert_eq!(memory.writes(), before, "known answers are not written");
    first.ends().await;
    // The other agent leads now, and removes an object that is not needed.
    until_awaited(
        "another leader",
        async || second.state().await.role,
        |role| role == "leads",
    )
    .await;
    second
        .names
        .send_replace(Arc::new(all_of(&["*.example.com"])));
    until_awaited(
        "one object",
        async || memory.objects().len(),
        |count| *count == 1,
    )
    .await;
    second.ends().await;
}

fn count_addresses(objects: &[ObjectView]) -> usize {
    let names = objects.iter().flat_map(|object| &object.names);
    names.map(|name| name.addresses.len()).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_answers_reach_the_files_although_writes_conflict() {
    let dir = tempfile::tempdir().unwrap();
    let files = FileStore::new(dir.path(), NAMESPACE);
    let agent = Agent::start(
        Conflicting::new(files.clone()),
        &["*.example.com", "www.example.org"],
    );
    agent.has_objects(2).await;
    // At the end, answers are not written to an object that is not in the store yet.
    agent.observe("www.example.org", [198, 51, 100, 0]);
    agent.observe("sub.example.com", [198, 51, 100, 1]);
    until_awaited(
        "both objects are in the store",
        async || addresses(&files.list().await.unwrap()),
        // The writer in between has addresses of its own.
        |all| expected()[..2].iter().all(|address| all.contains(address)),
    )
    .await;
    for n in 0..200 {
        agent.observe(
            if n % 2 == 0 {
                "www.example.org"
            } else {
                "sub.example.com"
            },
            [198, 51, 100, n],
        );
        if n % 10 == 0 {
            tokio::task::yield_now().await;
        }
    }
    let stored = async || addresses(&files.list().await.unwrap_or_default());
    until_awaited("all answers in the files", stored, |all| {
        expected().iter().all(|address| all.contains(address))
    })
    .await;
    agent.ends().await;
    let mut again = Agent::start(
        FileStore::new(dir.path(), NAMESPACE),
        &["*.example.com", "www.example.org"],
    );
    let listed = again.resolved.recv().await.unwrap();
    let known = listed.iter().filter_map(|event| match event {
        SourceEvent::Apply(name) => Some(name.addresses.len()),
        _ => None,
    });
    assert!(
        known.sum::<usize>() >= 200,
        "a restarted agent begins with the addresses"
    );
    again.ends().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_object_is_removed_before_every_document_is_read() {
    let memory = Memory::default();
    let first = Agent::start(memory.clone(), &["www.example.org", "old.example.org"]);
    first.has_objects(2).await;
    first.ends().await;
    assert_eq!(memory.objects().len(), 2);
    // The next run leads before it has read a policy, and then knows some of them.
    let second = Agent::start_with(memory.clone(), WantedNames::default());
    second.has_objects(2).await;
    let some = WantedNames {
        is_complete: false,
        ..all_of(&["new.example.org"])
    };
    second.names.send_replace(Arc::new(some));
    second.has_objects(3).await;
    let store = async || memory.objects().len();
    until_awaited("a new object", store, |count| *count == 3).await;
    let all = all_of(&["www.example.org", "new.example.org"]);
    second.names.send_replace(Arc::new(all));
    until_awaited("the old one is gone", store, |count| *count == 2).await;
    second.ends().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn names_go_on_locally_while_the_store_refuses_writes() {
    let memory = Memory::default();
    memory.refuse(true);
    let mut agent = Agent::start(memory.clone(), &["www.example.org"]);
    agent.has_objects(1).await;
    agent.observe("www.example.org", [198, 51, 100, 1]);
    let wanted = [IpAddr::from([198, 51, 100, 1])].into();
    loop {
        let events = agent.resolved.recv().await.expect("the task runs");
        let has = |event: &SourceEvent<ResolvedName>| matches!(event, SourceEvent::Apply(name) if name.addresses == wanted);
        if events.iter().any(has) {
            break;
        }
    }
    let problems = agent.state().await.problems.join("\n");
    assert!(
        problems.contains("DNSNameResolver objects cannot be written"),
        "{problems}"
    );
    memory.refuse(false);
    let store = memory.clone();
    until_awaited(
        "the answer in the store",
        async || addresses(&store.objects()),
        |all| all.len() == 1,
    )
    .await;
    until_awaited(
        "no problem",
        async || agent.state().await.problems,
        |problems| {
            problems
                .iter()
                .all(|problem| !problem.contains("cannot be written"))
        },
    )
    .await;
    agent.ends().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn names_are_kept_in_memory_while_the_directory_cannot_be_used() {
    let dir = tempfile::tempdir().unwrap();
    let blocked = dir.path().join("dnsnameresolvers");
    std::fs::write(&blocked, "").unwrap();
    let files = FileStore::new(dir.path(), NAMESPACE);
    let mut agent = Agent::start(files.clone(), &["www.example.org"]);
    agent.has_objects(1).await;
    assert_eq!(agent.state().await.role, "leads");
    agent.observe("www.example.org", [198, 51, 100, 1]);
    let wanted = [IpAddr::from([198, 51, 100, 1])].into();
    loop {
        let events = agent.resolved.recv().await.expect("the task runs");
        let has = |event: &SourceEvent<ResolvedName>| matches!(event, SourceEvent::Apply(name) if name.addresses == wanted);
        if events.iter().any(has) {
            break;
        }
    }
    let about_store = |mut state: ResolverView| {
        state
            .problems
            .retain(|problem| !problem.contains("no servers"));
        state.problems
    };
    let problems = about_store(agent.state().await);
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert!(problems[0].contains("--resolver-dir"), "{problems:?}");
    std::fs::remove_file(&blocked).unwrap();
    let stored = async || addresses(&files.list().await.unwrap_or_default());
    until_awaited("the answer in a file", stored, |all| all.len() == 1).await;
    let problems = async || about_store(agent.state().await);
    until_awaited("no problem", problems, Vec::is_empty).await;
    agent.ends().await;
}

#[test]
fn the_log_names_no_other_agent_where_none_may_lead() {
    use Role::{Follows, Leads, LeadsInMemory};
    let begins = Some("this agent looks up names of EgressFirewalls now");
    let ends = Some("this agent no longer looks up names of EgressFirewalls");
    for (before, now, says) in [
        (Follows, Leads, begins),
        (Follows, LeadsInMemory, begins),
        (Leads, Follows, ends),
        (LeadsInMemory, Follows, ends),
        (Leads, LeadsInMemory, None),
        (LeadsInMemory, Leads, None),
        (Follows, Follows, None),
    ] {
        assert_eq!(change_of_role(before, now), says, "{before:?} to {now:?}");
    }
}

#[test]
fn the_oldest_of_ten_thousand_waiting_answers_is_dropped_and_counted() {
    let queue = Observations::default();
    for n in 0..10_003_u32 {
        queue.push(Observation {
            name: Fqdn::normalise(&format!("{n}.example.com")),
            addresses: Vec::new(),
            ttl: Duration::ZERO,
            at: SystemTime::UNIX_EPOCH,
        });
    }
    assert_eq!((queue.len(), queue.dropped()), (10_000, 3));
    let first = queue.take_now().pop_front().unwrap();
    assert_eq!(first.name, Fqdn::normalise("3.example.com"));
}
