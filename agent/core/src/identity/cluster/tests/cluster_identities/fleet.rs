//! 200 agents and 500 label sets in random order, with lost answers, refusals, deletions and another writer.

use std::collections::HashMap;

use super::*;
use crate::{
    kubernetes::{book::Book, labels::LabelFilter},
    policy::document::{Body, PolicyDocument},
    source_event::SourceEvent,
};

const AGENTS: usize = 200;
const SETS: usize = 500;
const STEPS: usize = 40_000;

/// Random numbers by SplitMix64: the same ones in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) % limit as u64).unwrap()
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// The objects, and every change of them in order.
#[derive(Default)]
struct Server {
    objects: BTreeMap<IdentityId, CiliumIdentity>,
    log: Vec<SourceEvent<CiliumIdentity>>,
    /// Number of changes when the object was made.
    made: HashMap<IdentityId, usize>,
    seconds: u64,
}

impl Server {
    fn create(&mut self, id: IdentityId, labels: &LabelSet, is_ours: bool) -> bool {
        if self.objects.contains_key(&id) {
            return false;
        }
        let created = Some(self.seconds);
        let object = CiliumIdentity {
            created,
            is_ours,
            ..object(id.0, labels)
        };
        self.log.push(SourceEvent::Apply(object.clone()));
        self.made.insert(id, self.log.len());
        self.objects.insert(id, object);
        true
    }

    fn delete(&mut self, id: IdentityId) {
        self.objects.remove(&id);
        self.log.push(SourceEvent::Delete(id.0.to_string()));
    }

    /// The object that counts for a label set.
    fn number(&self, labels: &LabelSet) -> Option<IdentityId> {
        let of_set = self.objects.values().filter(|one| one.labels == *labels);
        of_set
            .map(CiliumIdentity::precedence)
            .min()
            .map(|one| one.id)
    }
}

/// What happened to a request.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// 5xx: the server did nothing.
    Refused,
    /// The server carried the request out, and the answer is lost.
    Lost,
}

struct Agent {
    numbers: ClusterWide,
    book: Book,
    /// How many changes of the server it has seen.
    seen: usize,
    /// Its pods' label sets: with a number, or without.
    sets: BTreeMap<LabelSet, Option<IdentityId>>,
}

/// What a number means on the nodes that have it in their datapath.
#[derive(Default)]
struct Meanings(HashMap<IdentityId, (LabelSet, usize)>);

impl Meanings {
    fn add(&mut self, id: IdentityId, labels: &LabelSet) {
        if id >= NODE_FIRST {
            return;
        }
        let (known, nodes) = self.0.entry(id).or_insert_with(|| (labels.clone(), 0));
        assert_eq!(known, labels, "number {id} has two meanings");
        *nodes += 1;
    }

    fn remove(&mut self, id: IdentityId) {
        if let Some((_, nodes)) = self.0.get_mut(&id) {
            *nodes -= 1;
            if *nodes == 0 {
                self.0.remove(&id);
            }
        }
    }
}

impl Agent {
    fn new() -> Self {
        Self {
            numbers: giver(Vec::new()),
            book: Book::new(LabelFilter::default(), "default"),
            seen: 0,
            sets: BTreeMap::new(),
        }
    }

    fn ask(&mut self, labels: &LabelSet, now: BootTime, meanings: &mut Meanings) {
        let Some(before) = self.sets.get(labels).copied() else {
            return;
        };
        let Asked::Have(acquired) = self.numbers.ask(labels, now) else {
            assert_eq!(before, None, "{labels:?} lost its number");
            return;
        };
        if before == Some(acquired.id) {
            self.numbers.release(acquired.id);
            return;
        }
        // On this node a number has one label set.
        let others = self.sets.iter().filter(|(other, _)| *other != labels);
        assert!(others.clone().all(|(_, id)| *id != Some(acquired.id)));
        meanings.add(acquired.id, labels);
        self.sets.insert(labels.clone(), Some(acquired.id));
        if let Some(before) = before {
            self.numbers.release(before);
            meanings.remove(before);
        }
    }

    /// Does what the core does after each event.
    fn settle(&mut self, now: BootTime, meanings: &mut Meanings) {
        loop {
            for labels in self.numbers.renumbered() {
                self.ask(&labels, now, meanings);
            }
            let held: BTreeSet<_> = self.sets.values().flatten().copied().collect();
            if self.numbers.sweep(&|id| held.contains(&id)).is_empty() {
                return;
            }
        }
    }

    /// Sees some of the changes, in their order.
    fn watch(&mut self, server: &Server, most: usize, now: BootTime) {
        let until = server.log.len().min(self.seen.saturating_add(most));
        for change in &server.log[self.seen..until] {
            match change {
                SourceEvent::Apply(object) => self.book.put(&PolicyDocument {
                    key: format!("CiliumIdentity/{}", object.id.0),
                    source: "cluster".to_owned(),
                    warnings: Vec::new(),
                    body: Body::Identity(object.clone()),
                }),
                SourceEvent::Delete(number) => {
                    self.book.remove(&format!("CiliumIdentity/{number}"))
                }
                SourceEvent::Init | SourceEvent::InitDone => {}
            }
        }
        self.seen = until;
        for change in self.book.changes().identities {
            match change {
                SourceEvent::Apply(object) => {
                    let counts = Some(&object).filter(|object| !object.is_duplicate);
                    self.numbers.learn(object.id, counts, now);
                }
                SourceEvent::Delete(number) => {
                    self.numbers
                        .learn(IdentityId(number.parse().unwrap()), None, now);
                }
                SourceEvent::Init | SourceEvent::InitDone => {}
            }
        }
    }

    /// Tries to make the object of one label set, as the task does.
    fn create(&mut self, server: &mut Server, labels: &LabelSet, fault: Fault, now: BootTime) {
        if !self.numbers.lacks(labels) {
            return;
        }
        for id in self.numbers.choices(labels, now) {
            if fault == Fault::Refused {
                return;
            }
            let is_theirs =
                server.create(id, labels, true) || server.objects[&id].labels == *labels;
            if is_theirs {
                if fault == Fault::None {
                    self.numbers.given(labels, id, now);
                }
                return;
            }
        }
    }

    fn lacking(&self) -> Vec<LabelSet> {
        let lacks = |labels: &&LabelSet| self.numbers.numbers.assigned(labels).is_none();
        self.sets.keys().filter(lacks).cloned().collect()
    }
}

struct Fleet {
    random: Random,
    server: Server,
    agents: Vec<Agent>,
    sets: Vec<LabelSet>,
    meanings: Meanings,
    ms: u64,
    deleted: usize,
}

impl Fleet {
    fn step(&mut self) {
        self.ms += self.random.below(20) as u64;
        self.server.seconds = self.ms / 1000;
        let now = at(self.ms);
        let (random, server, meanings) = (&mut self.random, &mut self.server, &mut self.meanings);
        let agent = random.below(AGENTS);
        let agent = &mut self.agents[agent];
        match random.below(10) {
            0..=2 => {
                let labels = self.sets[random.below(SETS)].clone();
                if random.one_in(4) {
                    // The last pod of a label set is removed.
                    if let Some(Some(id)) = agent.sets.remove(&labels) {
                        agent.numbers.release(id);
                        meanings.remove(id);
                    }
                } else {
                    agent.sets.entry(labels.clone()).or_insert(None);
                    agent.ask(&labels, now, meanings);
                }
            }
            3..=5 => agent.watch(server, 1 + random.below(60), now),
            6..=8 => {
                let lacking = agent.lacking();
                let fault = match random.below(6) {
                    0 => Fault::Refused,
                    1 => Fault::Lost,
                    _ => Fault::None,
                };
                if !lacking.is_empty() {
                    let labels = &lacking[random.below(lacking.len())];
                    agent.create(server, labels, fault, now);
                }
            }
            _ => agent.numbers.waited_too_long(now),
        }
        agent.settle(now, meanings);
        if self.random.one_in(100) {
            self.interfere();
        }
    }

    /// Another program deletes an object in use, or makes one more for a label set.
    fn interfere(&mut self) {
        let id = u32::try_from(self.random.below(61_184)).unwrap() + 256;
        let labels = &self.sets[self.random.below(SETS)];
        let is_new = !self.server.made.contains_key(&IdentityId(id));
        if self.random.one_in(2) && is_new {
            self.server.create(IdentityId(id), labels, false);
            return;
        }
        // An object that every agent has seen: an agent that has not seen it cannot know that the
        // number has to rest.
        let seen = self.agents.iter().map(|agent| agent.seen).min().unwrap();
        let made = &self.server.made;
        let mut all = self
            .server
            .objects
            .keys()
            .filter(|id| made[*id] <= seen)
            .copied();
        if let Some(id) = all.nth(self.random.below(SETS)) {
            self.server.delete(id);
            self.deleted += 1;
        }
    }

    /// Ends the faults: agents see every change, and their requests succeed.
    fn rest(&mut self) {
        for _ in 0..20 {
            self.ms += 61_000;
            let now = at(self.ms);
            self.server.seconds = self.ms / 1000;
            for agent in &mut self.agents {
                agent.watch(&self.server, usize::MAX, now);
                agent.numbers.waited_too_long(now);
                agent.settle(now, &mut self.meanings);
                for labels in agent.lacking() {
                    agent.create(&mut self.server, &labels, Fault::None, now);
                }
                agent.settle(now, &mut self.meanings);
            }
        }
    }
}

#[test]
fn cluster_identities_of_a_fleet_under_faults_are_one_number_for_each_set() {
    for seed in [1, 2, 3] {
        let mut fleet = Fleet {
            random: Random(seed),
            server: Server::default(),
            agents: (0..AGENTS).map(|_| Agent::new()).collect(),
            sets: (0..SETS).map(|n| set(&n.to_string())).collect(),
            meanings: Meanings::default(),
            ms: 0,
            deleted: 0,
        };
        for _ in 0..STEPS {
            fleet.step();
        }
        assert!(
            fleet.deleted > 20,
            "{} objects were deleted in use",
            fleet.deleted
        );
        fleet.rest();
        for agent in &fleet.agents {
            for (labels, id) in &agent.sets {
                let number = fleet.server.number(labels);
                assert!(
                    number.is_some() && *id == number,
                    "seed {seed}: {labels:?}: {id:?}, {number:?}"
                );
            }
        }
    }
}
