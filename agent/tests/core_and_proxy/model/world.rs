//! The state that the scheduler changes, and the checks of it.

mod addresses;
mod changes;
mod checks;
mod failure;
mod pods;
mod settle;
mod uses;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use agent_core::{
    core::{
        CoreConfig, Effect, Event, Restored,
        event::{CleanNames, MappingEvent, RevokeAck, StreamId},
        testing::{
            cluster::Cluster,
            node::{Node, spec},
            policy::document,
            restart::again,
        },
    },
    datapath::memory::MemoryDatapath,
    policy::document::PolicyDocument,
    source_event::SourceEvent,
};
use dns_policy::{
    boot_time::BootTime,
    epoch::Epoch,
    mapping::{EndpointInstance, Mapping, Realised},
    name::Fqdn,
    rule::Transport,
};
use holdfast_sdp::mapping::Release;

pub(super) use self::{
    addresses::{ADDRESSES, Addresses},
    failure::Failure,
};
use super::{
    Act, DNS, LastWrite, PROXIES, Spec,
    proxy::{self, Down, MAX_DELAY, Proxy, Up},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// Held by its proxy since this time.
    Held(BootTime),
    /// Released to the client at this time.
    Released(BootTime),
    /// The proxy died with it.
    Lost,
    /// A request removed its name.
    Cleaned,
}

#[derive(Debug)]
pub(super) struct Answer {
    name: &'static str,
    addresses: Vec<IpAddr>,
    ttl: u32,
    proxy: u64,
    pub(super) fate: Fate,
    /// The name was cleaned while the answer was held: an agent that received its mapping opens it, and an agent that
    /// starts afterwards does not.
    between: bool,
    /// A proxy was killed since then: up to an eighth of the answer's life plus a second may be forgotten.
    shaken: bool,
}

pub(super) struct World {
    now: BootTime,
    /// The node of the agent that runs, or of the agent that ran last.
    pub(super) node: Node,
    agent: bool,
    synced: bool,
    /// The other endpoint is there.
    other: bool,
    cluster: Cluster,
    /// Some writes failed: maps may lack what was written since.
    troubled: bool,
    start: u64,
    published: Option<u64>,
    /// Documents as the sources have them, and as the agent last received them.
    documents: BTreeMap<usize, PolicyDocument>,
    applied: BTreeMap<usize, PolicyDocument>,
    proxies: [(u64, Proxy); PROXIES],
    next_proxy: u64,
    next_stream: u64,
    pub(super) orphans: Vec<Vec<u8>>,
    pub(super) answers: Vec<Answer>,
    /// When a request last removed a name. A journal may lack later answers: if it reports an older one again, the
    /// agent refuses it.
    cleaned: BTreeMap<&'static str, BootTime>,
    /// Names and addresses of what is on its way, by stream and sequence.
    sent: BTreeMap<(StreamId, u64), (Fqdn, Vec<IpAddr>)>,
    /// Lease ends by stream, name and address.
    promises: BTreeMap<(StreamId, Fqdn, IpAddr), BootTime>,
    revocations: BTreeMap<u64, (Fqdn, Vec<IpAddr>)>,
    /// Streams of processes that have ended, of which the agent does not know yet.
    ended: Vec<StreamId>,
    /// Expired addresses are kept for connections.
    zombies: bool,
    /// Name and address that each connection of the pod is about.
    uses: BTreeSet<(&'static str, IpAddr)>,
}

fn config(start: u64, zombies: bool) -> CoreConfig {
    CoreConfig {
        start,
        max_deferred_deletes: if zombies { 10_000 } else { 0 },
        work_budget: 8,
        ..CoreConfig::default()
    }
}

impl World {
    pub(super) fn new() -> Self {
        Self::start(false)
    }

    pub(super) fn with_zombies() -> Self {
        Self::start(true)
    }

    fn start(zombies: bool) -> Self {
        let config = config(1, zombies);
        let node = Node::with(config, Restored::default(), MemoryDatapath::default());
        let now = node.now;
        let dns = document("dns", DNS);
        let names = document("p0", Spec::WebToCiliumNames.text());
        let mut world = Self {
            now,
            node,
            agent: true,
            synced: false,
            other: false,
            cluster: Cluster::new(),
            troubled: false,
            start: 1,
            published: None,
            documents: [(9, dns), (0, names)].into(),
            applied: BTreeMap::new(),
            proxies: [(1, Proxy::start(now)), (2, Proxy::start(now))],
            next_proxy: 3,
            next_stream: 1,
            orphans: Vec::new(),
            answers: Vec::new(),
            cleaned: BTreeMap::new(),
            sent: BTreeMap::new(),
            promises: BTreeMap::new(),
            revocations: BTreeMap::new(),
            ended: Vec::new(),
            zombies,
            uses: BTreeSet::new(),
        };
        world.act(Act::Sync);
        for proxy in 0..PROXIES {
            world.act(Act::Connect(proxy));
        }
        world.act(Act::Settle);
        world
    }

    pub(super) fn act(&mut self, act: Act) {
        // No two things happen at one instant.
        self.now = self.now.plus(Duration::from_micros(1));
        match act {
            Act::Answer(..) | Act::KillProxy(..) => {}
            // Writing takes milliseconds: writes without a waiting caller are on disk then.
            _ => (0..PROXIES).for_each(|proxy| self.write(proxy)),
        }
        match act {
            Act::Clean(_)
            | Act::Policy(..)
            | Act::AddOther
            | Act::RemoveOther
            | Act::ConntrackScan(_)
            | Act::Settle => self.end_change(),
            _ => {}
        }
        match act {
            Act::Answer(proxy, name, addresses, ttl) => self.answer(proxy, name, addresses, ttl),
            Act::Send(proxy) => self.proxies[proxy].1.send(self.now),
            Act::Run(proxy) => self.run(proxy),
            Act::Deliver(proxy) => self.deliver(proxy),
            Act::Connect(proxy) => self.connect(proxy),
            Act::KillProxy(proxy, write) => self.kill_proxy(proxy, write),
            Act::Reap => self.reap(),
            Act::Drain(proxy) => self.drain(proxy),
            Act::Adopt(proxy) => {
                if let Some(file) = self.orphans.pop() {
                    self.proxies[proxy].1.adopt(&file, self.now);
                }
            }
            Act::KillAgent => self.kill_agent(),
            Act::StartAgent => self.start_agent(),
            Act::Sync => self.sync(),
            Act::Policy(slot, spec) => self.policy(slot, spec),
            Act::ContinueChange => self.go_on(),
            Act::Clean(name) => self.clean(name),
            Act::AddOther => self.other(true),
            Act::RemoveOther => self.other(false),
            Act::ClusterPod(is_web) => self.cluster_pod(is_web),
            Act::Team(team) => self.team(team),
            Act::Service(ports) => self.service(ports),
            Act::Fail(failure) => {
                self.node.datapath.fail = failure.steps();
                self.troubled |= self.node.datapath.fail.is_some();
            }
            Act::OpenConnection(address) => self.open_connection(address),
            Act::CloseConnections(address) => self.close_connections(address),
            Act::ConntrackScan(scan) => self.conntrack_scan(scan),
            Act::Wait(millis) => self.wait(Duration::from_millis(millis)),
            Act::Settle => self.settle(),
        }
        (0..PROXIES).for_each(|proxy| self.release(proxy));
        self.check_promises();
        self.check_uses();
    }

    fn answer(&mut self, proxy: usize, name: &'static str, addresses: Addresses, ttl: u32) {
        let addresses = addresses.list();
        // The endpoint that was added first, whatever was added later.
        let endpoint = shared_maps::EndpointId(1);
        let mapping = Mapping {
            endpoint: EndpointInstance {
                id: endpoint,
                client: "10.0.0.7".parse().unwrap(),
                ifindex: 107,
            },
            name: Fqdn::normalise(name),
            addresses: addresses.clone(),
            ttl,
            seen_at: self.now,
            rcode: 0,
            server: "10.9.0.53:53".parse().unwrap(),
            transport: Transport::Udp,
            replayed: false,
        };
        let number = self.answers.len();
        let (id, proxy) = &self.proxies[proxy];
        self.answers.push(Answer {
            name,
            addresses,
            ttl,
            proxy: *id,
            fate: Fate::Held(self.now),
            between: false,
            shaken: false,
        });
        match proxy.learn(number, mapping, self.now) {
            Release::Held => {}
            Release::Leased => self.goes(number, false),
            Release::AgentAway => self.goes(number, true),
        }
    }

    /// An answer goes to its client.
    fn goes(&mut self, number: usize, excused: bool) {
        let answer = &mut self.answers[number];
        if !matches!(answer.fate, Fate::Held(_)) {
            return;
        }
        answer.fate = Fate::Released(self.now);
        let answer = &self.answers[number];
        if !excused {
            for address in &answer.addresses {
                self.check_labels(answer.name, *address, "it was released");
            }
        }
    }

    /// Held answers whose fate is known, or whose time is over.
    fn release(&mut self, proxy: usize) {
        let (id, proxy) = &self.proxies[proxy];
        let (id, results) = (*id, proxy.take_results());
        for (number, realised) in results {
            self.goes(number, realised != Realised::Yes);
        }
        let now = self.now;
        let late = |answer: &Answer| matches!(answer.fate, Fate::Held(since) if since.plus(MAX_DELAY) <= now);
        let late: Vec<usize> = (0..self.answers.len())
            .filter(|n| self.answers[*n].proxy == id && late(&self.answers[*n]))
            .collect();
        for number in late {
            if let Fate::Held(since) = self.answers[number].fate {
                self.answers[number].fate = Fate::Released(since.plus(MAX_DELAY));
            }
        }
    }

    fn write(&mut self, proxy: usize) {
        let now = self.now;
        self.proxies[proxy].1.write(now, LastWrite::Whole);
        self.release(proxy);
    }

    /// The agent takes an event, and what follows goes onto the streams.
    fn event(&mut self, event: Event) {
        self.node.now = self.now;
        self.node.part(event);
        self.effects();
    }

    fn effects(&mut self) {
        for effect in std::mem::take(&mut self.node.effects) {
            match effect {
                Effect::Result(result) => {
                    let sent = self.sent.get(&(result.stream, result.sequence)).cloned();
                    let (name, addresses) = sent.expect("a result of something sent");
                    for address in addresses {
                        // The second result, which reports durability, grants nothing.
                        if let Some(lease_end) = result.lease_end
                            && !result.durable
                        {
                            let key = (result.stream, name.clone(), address);
                            let end = self.promises.entry(key).or_default();
                            *end = (*end).max(lease_end);
                        }
                    }
                    self.down(result.stream, || Down::Result(result.clone()));
                }
                Effect::Rules(rules) => self.published = Some(rules.revision),
                Effect::SnapshotReady
                | Effect::Observed(_)
                | Effect::Resolver { .. }
                | Effect::WantedIdentities(_) => {}
                Effect::Revoke(revocation) => {
                    let what = (revocation.name.clone(), revocation.addresses.clone());
                    self.revocations.insert(revocation.id, what);
                    for stream in revocation.streams.clone() {
                        self.down(stream, || Down::Revoke(revocation.clone()));
                    }
                }
            }
        }
        if let Some(revision) = self.published {
            let epoch = self.epoch();
            for (_, proxy) in &mut self.proxies {
                let known = proxy.down.iter().rev().find_map(|down| match down {
                    Down::Rules(_, revision) => Some(*revision),
                    _ => None,
                });
                let has = known.or(proxy.sink.rules_revision());
                if proxy.stream.is_some() && (has != Some(revision) || known.is_none()) {
                    proxy.down.push_back(Down::Rules(epoch.clone(), revision));
                }
            }
        }
    }

    fn down(&mut self, stream: StreamId, message: impl Fn() -> Down) {
        for (_, proxy) in &mut self.proxies {
            if proxy.stream == Some(stream) {
                proxy.down.push_back(message());
            }
        }
    }

    fn epoch(&self) -> Epoch {
        Epoch {
            boot_id: proxy::BOOT.to_owned(),
            start: self.start,
        }
    }

    fn run(&mut self, proxy: usize) {
        let proxy = &mut self.proxies[proxy].1;
        let (Some(stream), true) = (proxy.stream, self.agent) else {
            return;
        };
        let mut mappings = Vec::new();
        for up in std::mem::take(&mut proxy.up) {
            match up {
                Up::Mapping(out) => {
                    let what = (out.mapping.name.clone(), out.mapping.addresses.clone());
                    self.sent.insert((stream, out.sequence), what);
                    mappings.push(MappingEvent {
                        stream,
                        sequence: out.sequence,
                        mapping: out.mapping,
                    });
                }
                Up::Ack(id) => {
                    self.event(Event::Mappings(std::mem::take(&mut mappings)));
                    if let Some((name, addresses)) = self.revocations.get(&id).cloned() {
                        for address in addresses {
                            self.promises.remove(&(stream, name.clone(), address));
                        }
                    }
                    self.event(Event::RevokeAcked(vec![RevokeAck { stream, id }]));
                }
            }
        }
        if !mappings.is_empty() {
            self.event(Event::Mappings(mappings));
        }
    }

    fn deliver(&mut self, proxy: usize) {
        if let Some(revocation) = self.proxies[proxy].1.deliver() {
            let id = self.proxies[proxy].0;
            for answer in &mut self.answers {
                let same = Fqdn::normalise(answer.name) == revocation.name;
                if same && answer.proxy == id && matches!(answer.fate, Fate::Released(_)) {
                    answer.fate = Fate::Cleaned;
                }
            }
        }
    }

    fn connect(&mut self, proxy: usize) {
        if !self.agent || self.proxies[proxy].1.stream.is_some() {
            return;
        }
        let stream = StreamId(self.next_stream);
        self.next_stream += 1;
        let epoch = self.epoch();
        let proxy = &mut self.proxies[proxy].1;
        proxy.down.clear();
        proxy.stream = Some(stream);
        proxy.sink.agent_up(epoch.clone(), Some(0));
        self.event(Event::StreamUp(stream));
    }

    fn kill_proxy(&mut self, slot: usize, write: LastWrite) {
        let fresh = Proxy::start(self.now);
        let now = self.now;
        self.proxies[slot].1.write(now, write);
        if write == LastWrite::Whole {
            self.release(slot);
        }
        let id = std::mem::replace(&mut self.proxies[slot].0, self.next_proxy);
        self.next_proxy += 1;
        let killed = std::mem::replace(&mut self.proxies[slot].1, fresh);
        for answer in &mut self.answers {
            answer.shaken = true;
            if answer.proxy == id && matches!(answer.fate, Fate::Held(_)) {
                answer.fate = Fate::Lost;
            }
        }
        self.gone(&killed);
        self.orphans.push(killed.file());
    }

    fn gone(&mut self, proxy: &Proxy) {
        if let Some(stream) = proxy.stream
            && self.agent
        {
            self.event(Event::StreamDown(stream));
            self.ended.push(stream);
        }
    }

    fn reap(&mut self) {
        let ended = std::mem::take(&mut self.ended);
        if self.agent && !ended.is_empty() {
            self.promises
                .retain(|(stream, _, _), _| !ended.contains(stream));
            self.event(Event::HolderEnded(ended));
        }
    }

    /// Leaves in order: held answers get their time, then the journal is handed over.
    fn drain(&mut self, slot: usize) {
        self.wait(MAX_DELAY);
        self.release(slot);
        self.write(slot);
        self.kill_proxy(slot, LastWrite::Whole);
    }

    fn kill_agent(&mut self) {
        if !self.agent {
            return;
        }
        self.agent = false;
        self.synced = false;
        // Names that were learned and expired within the seconds until a file is written are lost.
        self.uses.clear();
        self.published = None;
        self.promises.clear();
        self.revocations.clear();
        self.ended.clear();
        for (_, proxy) in &mut self.proxies {
            if proxy.stream.is_some() {
                proxy.down.push_back(Down::Closed);
            }
        }
    }

    fn start_agent(&mut self) {
        if self.agent {
            return;
        }
        self.hear_the_end();
        self.start += 1;
        self.node.now = self.now;
        self.node = again(&self.node, config(self.start, self.zombies), &[107, 108]);
        self.now = self.node.now;
        self.agent = true;
        self.synced = false;
    }

    /// Proxies notice at once that a connection was closed, whatever else they have to do.
    fn hear_the_end(&mut self) {
        for proxy in 0..PROXIES {
            let closed = |down: &Down| matches!(down, Down::Closed);
            while self.proxies[proxy].1.down.iter().any(closed) {
                self.deliver(proxy);
            }
            self.write(proxy);
        }
    }

    fn sync(&mut self) {
        if !self.agent || self.synced {
            return;
        }
        self.synced = true;
        self.applied = self.documents.clone();
        self.event(Event::Policies(SourceEvent::Init));
        self.replay_cluster();
        self.event(Event::Endpoints(SourceEvent::Init));
        for document in self.documents.clone().into_values() {
            self.event(Event::Policies(SourceEvent::Apply(document)));
        }
        self.event(Event::Endpoints(SourceEvent::Apply(spec(
            "web", 7, "app=web",
        ))));
        if self.other {
            self.event(Event::Endpoints(SourceEvent::Apply(spec(
                "other", 8, "app=web",
            ))));
        }
        self.event(Event::Policies(SourceEvent::InitDone));
        self.event(Event::Endpoints(SourceEvent::InitDone));
    }

    fn other(&mut self, there: bool) {
        self.other = there;
        if self.agent && self.synced {
            self.event(Event::Endpoints(if there {
                SourceEvent::Apply(spec("other", 8, "app=web"))
            } else {
                SourceEvent::Delete("other".to_owned())
            }));
        }
    }

    fn clean(&mut self, name: &'static str) {
        if !self.agent || !self.synced {
            return;
        }
        self.cleaned.insert(name, self.now);
        self.uses.retain(|(of, _)| *of != name);
        for answer in &mut self.answers {
            if answer.name == name {
                answer.between |= matches!(answer.fate, Fate::Held(_));
                answer.fate = match answer.fate {
                    Fate::Released(_) => Fate::Cleaned,
                    fate => fate,
                };
            }
        }
        let pattern = name.trim_end_matches('.').to_owned();
        self.event(Event::CleanNames(CleanNames {
            pattern: Some(pattern),
            endpoint: None,
        }));
    }

    fn wait(&mut self, time: Duration) {
        self.hear_the_end();
        let until = self.now.plus(time);
        while self.agent
            && let Some(at) = self.node.core.next_deadline()
            && at <= until
        {
            self.now = self.now.max(at);
            self.event(Event::Tick);
            self.check_promises();
            self.check_uses();
        }
        self.now = until;
        for proxy in 0..PROXIES {
            self.release(proxy);
            self.proxies[proxy].1.expire(self.now);
            self.release(proxy);
        }
    }
}
