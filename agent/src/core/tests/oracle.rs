//! Random histories against a verdict worked out from scratch, and every state on the way:
//! the agent may stop between any two map operations.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use holdfast_sdp::{
    mapping::{BootTime, Realised},
    name::Fqdn,
    pattern::SelectorMatcher,
    policy::rule::NameRule,
};
use ipnet::IpNet;
use proptest::prelude::*;
use shared_maps::{
    EndpointId, IdentityId,
    policy::{EGRESS, INGRESS},
};

use super::scenario::{Node, mapping, spec};
use crate::{
    core::{CoreConfig, Event, Restored, event::SourceEvent},
    datapath::{memory::MemoryDatapath, plan::Datapath as _},
    ipcache::table::prefix_of,
    labels::{CIDR_GROUP, Label, LabelSet},
    policy::{
        compute::{decide, dns_rules, longest},
        model::EndpointPolicy,
        parse::{PolicyDocument, group_key, parse_documents},
        rule::{Direction, Peers},
        trace::{Port, Verdict, Way},
    },
    selector::selector::{Entity, FqdnSelector, Selector, group_label},
};

mod language;
mod pod;

use self::language::{ADDRESSES, GROUPS, NAMES, NODE, PORTS, remotes};
pub(super) use self::{language::SPECS, pod::Pod};

/// What happens to a packet, the closest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Fate {
    Dropped,
    Proxied,
    Passed,
}

/// Always there, so that answers are believed.
const DNS: &str = "endpointSelector: {}\n  egress:\n  - toCIDR: [10.9.0.53/32]\n    toPorts: [{ports: [{port: 53}], rules: {dns: [{matchPattern: '*'}]}}]\n  enableDefaultDeny: {egress: false}";

#[derive(Clone, Debug)]
pub(super) enum Act {
    Policy(u8, usize),
    Drop(u8),
    Group(u8, Option<usize>),
    Endpoint(u8, Pod),
    Gone(u8),
    Learn(usize, usize),
    Wait(u64),
}

pub(super) fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        4 => (0u8..4, 0..SPECS.len()).prop_map(|(slot, spec)| Act::Policy(slot, spec)),
        1 => (0u8..4).prop_map(Act::Drop),
        2 => (0u8..2, prop::option::weighted(0.8, 0..GROUPS.len())).prop_map(|(slot, group)| Act::Group(slot, group)),
        2 => (7u8..10, pod::pod()).prop_map(|(host, pod)| Act::Endpoint(host, pod)),
        1 => (8u8..10).prop_map(Act::Gone),
        4 => (0..NAMES.len(), 0..ADDRESSES.len()).prop_map(|(n, a)| Act::Learn(n, a)),
        2 => (1u64..150).prop_map(Act::Wait),
    ];
    prop::collection::vec(act, 1..25)
}

pub(super) fn document(name: &str, spec: &str) -> PolicyDocument {
    let text = format!(
        "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {{name: {name}}}\nspec:\n  {spec}"
    );
    parse_documents(&text, "test").remove(0).unwrap()
}

/// The world as the test knows it.
pub(super) struct World {
    pub(super) node: Node,
    policies: BTreeMap<String, PolicyDocument>,
    endpoints: BTreeMap<u8, Pod>,
    pairs: BTreeMap<(usize, IpAddr), BootTime>,
}

fn node_addresses() -> Event {
    Event::NodeAddresses(vec![NODE.parse().unwrap()])
}

fn is_node(address: IpAddr) -> bool {
    address == NODE.parse::<IpAddr>().unwrap()
}

pub(super) fn config() -> CoreConfig {
    CoreConfig {
        max_deferred_deletes: 0,
        reconcile_interval: std::time::Duration::ZERO,
        ..CoreConfig::default()
    }
}

impl World {
    pub(super) fn new() -> Self {
        let mut node = Node::with(config(), Restored::default(), MemoryDatapath::default());
        node.begin();
        node.event(node_addresses());
        let dns = document("dns", DNS);
        node.event(Event::Policies(SourceEvent::Apply(dns.clone())));
        node.endpoint(spec("7", 7, "app=web"));
        node.sync();
        Self {
            node,
            policies: [("dns".to_owned(), dns)].into(),
            endpoints: [(7, Pod::WEB)].into(),
            pairs: BTreeMap::new(),
        }
    }

    /// Puts an act through; the states on the way are checked.
    pub(super) fn act(&mut self, act: &Act) {
        let event = match act {
            Act::Policy(slot, spec) => self.document(&format!("p{slot}"), Some(SPECS[*spec])),
            Act::Drop(slot) => self.document(&format!("p{slot}"), None),
            Act::Group(slot, group) => self.group(&format!("g{slot}"), *group),
            Act::Endpoint(host, pod) => self.host(*host, Some(*pod)),
            Act::Gone(host) => self.host(*host, None),
            Act::Learn(name, address) => {
                let text = ADDRESSES[*address];
                let local = self
                    .node
                    .core
                    .snapshot()
                    .endpoints
                    .iter()
                    .any(|e| e.ipv4.as_deref() == Some(text));
                let mut mapping = mapping(&self.node, NAMES[*name], &[text]);
                let web = self
                    .node
                    .core
                    .snapshot()
                    .endpoints
                    .iter()
                    .find(|e| e.key == "7")
                    .unwrap()
                    .id;
                mapping.endpoint.id = EndpointId(web);
                let before = self.node.datapath.clone();
                let (_, outcome) = self.node.mapping(mapping);
                assert_eq!(outcome.realised, Realised::Yes);
                if !local {
                    let end = BootTime(outcome.lease_end).plus_secs(5);
                    let address = text.parse().unwrap();
                    self.pairs.insert((*name, address), end);
                }
                check_way(&before, &self.node.datapath);
                return;
            }
            Act::Wait(secs) => {
                self.node.now = self.node.now.plus_secs(*secs);
                let now = self.node.now;
                self.pairs.retain(|_, end| *end > now);
                Event::Tick
            }
        };
        let before = self.node.datapath.clone();
        self.node.event(event);
        check_way(&before, &self.node.datapath);
    }

    /// A document comes, changes (`Some`) or goes.
    pub(super) fn document(&mut self, name: &str, spec: Option<&str>) -> Event {
        Event::Policies(match spec {
            Some(spec) => {
                let document = document(name, spec);
                self.policies.insert(name.to_owned(), document.clone());
                SourceEvent::Apply(document)
            }
            None => {
                self.policies.remove(name);
                SourceEvent::Delete(format!("CiliumNetworkPolicy/default/{name}"))
            }
        })
    }

    /// A group of blocks comes, changes (`Some`) or goes.
    fn group(&mut self, name: &str, group: Option<usize>) -> Event {
        Event::Policies(match group {
            Some(group) => {
                let (labels, blocks) = GROUPS[group];
                let text = format!(
                    "apiVersion: cilium.io/v2\nkind: CiliumCIDRGroup\nmetadata: {{name: {name}, labels: {labels}}}\nspec: {{externalCIDRs: {blocks}}}"
                );
                let document = parse_documents(&text, "test").remove(0).unwrap();
                self.policies.insert(name.to_owned(), document.clone());
                SourceEvent::Apply(document)
            }
            None => {
                self.policies.remove(name);
                SourceEvent::Delete(group_key(name))
            }
        })
    }

    /// An endpoint comes, changes or goes.
    pub(super) fn host(&mut self, host: u8, pod: Option<Pod>) -> Event {
        Event::Endpoints(match pod {
            Some(pod) => {
                self.endpoints.insert(host, pod);
                SourceEvent::Apply(pod.spec(host))
            }
            None => {
                self.endpoints.remove(&host);
                SourceEvent::Delete(host.to_string())
            }
        })
    }

    /// Tells another run of the agent what the sources say.
    pub(super) fn replay(&self, node: &mut Node) {
        node.event(node_addresses());
        for document in self.policies.values() {
            node.event(Event::Policies(SourceEvent::Apply(document.clone())));
        }
        for (host, pod) in &self.endpoints {
            node.endpoint(pod.spec(*host));
        }
    }

    /// The maps say what a reading of the policies from scratch says.
    pub(super) fn check_end(&self) {
        for endpoint in &self.node.core.snapshot().endpoints {
            let host: u8 = endpoint.key.parse().unwrap();
            for remote in remotes() {
                for (protocol, port) in PORTS.iter().copied() {
                    for direction in [EGRESS, INGRESS] {
                        let question = Question {
                            endpoint: EndpointId(endpoint.id),
                            remote,
                            direction,
                            protocol,
                            port,
                        };
                        let is = fate(&self.node.datapath, question).expect("it has a policy map");
                        let shall = self.verdict(host, remote, direction, protocol, port);
                        assert_eq!(is, shall, "endpoint {host}: {question:?}");
                        assert_eq!(self.told(question), Some(shall), "told of {question:?}");
                    }
                }
            }
        }
        self.check_names();
        self.check_dns();
        for endpoint in &self.node.core.snapshot().endpoints {
            assert!(IdentityId(endpoint.identity).is_endpoint());
        }
    }

    /// What `why` says that policy says.
    fn told(&self, question: Question) -> Option<Fate> {
        let way = match question.direction {
            EGRESS => Way::Egress,
            _ => Way::Ingress,
        };
        let port = Port {
            protocol: question.protocol,
            number: question.port,
        };
        let peer = identity(&self.node.datapath, question.remote);
        let found = self
            .node
            .core
            .peer(question.endpoint, way, peer, Some(port));
        Some(match found.verdict? {
            Verdict::Denied | Verdict::NoRule => Fate::Dropped,
            Verdict::Proxied => Fate::Proxied,
            Verdict::Allowed | Verdict::NotRestricted | Verdict::FromNode => Fate::Passed,
        })
    }

    /// The proxies' rules are those of the policies read from scratch, but for identities that
    /// went: these are left out next time.
    fn check_dns(&self) {
        let state = &self.node.core.state;
        for subject in state.subjects.values().filter(|subject| !subject.dns_dirty) {
            let policy = EndpointPolicy::of(&subject.labels, &state.repository);
            assert_eq!(*subject.dns, dns_rules(&policy, &state.selectors));
        }
    }

    /// name → IP live and selected ⇒ the ipcache has the IP with all its labels.
    fn check_names(&self) {
        let snapshot = self.node.core.snapshot();
        for (name, address) in self.pairs.keys() {
            if self.local(*address).is_some() {
                continue;
            }
            let name = Fqdn::normalise(NAMES[*name]);
            let selectors = self.selectors();
            let matching: BTreeSet<_> = selectors
                .iter()
                .filter(|s| matcher(s).matches(&name))
                .map(|s| s.label())
                .collect();
            if matching.is_empty() {
                continue;
            }
            let identity = identity(&self.node.datapath, *address);
            let found = snapshot.identities.iter().find(|i| i.id == identity.0);
            let labels = &found.expect("its identity is allocated").labels;
            for label in matching {
                assert!(
                    labels.contains(&label.to_string()),
                    "{address}: {labels:?} lacks {label}"
                );
            }
        }
    }

    fn selectors(&self) -> Vec<FqdnSelector> {
        let rules = self.policies.values().flat_map(|document| &document.rules);
        let selectors = rules.flat_map(|rule| rule.selectors());
        let fqdn = selectors.filter_map(|selector| match selector {
            Selector::Fqdn(fqdn) => Some(fqdn.clone()),
            _ => None,
        });
        fqdn.collect()
    }

    fn local(&self, address: IpAddr) -> Option<Pod> {
        let mut hosts = self.endpoints.iter();
        let found = hosts.find(|(host, _)| address == IpAddr::from([10, 0, 0, **host]));
        found.map(|(_, pod)| *pod)
    }

    fn verdict(&self, host: u8, remote: IpAddr, direction: u8, protocol: u8, port: u16) -> Fate {
        let pod = self.endpoints[&host];
        let own = pod.labels();
        let receiver = match direction {
            EGRESS => self.local(remote),
            _ => Some(pod),
        };
        let nobody = Pod::WEB;
        let rules = self.policies.values().flat_map(|document| &document.rules);
        let sides: Vec<&Direction> = rules
            .filter(|rule| rule.subject.matches(&own))
            .map(|rule| {
                if direction == EGRESS {
                    &rule.egress
                } else {
                    &rule.ingress
                }
            })
            .collect();
        let mut fates = Vec::new();
        for rule in sides.iter().flat_map(|side| &side.peers) {
            let meant = match &rule.peers {
                Peers::Any => true,
                Peers::Selectors(list) => {
                    list.iter().any(|selector| self.selects(selector, remote))
                }
            };
            let ports: Vec<_> = rule
                .ports
                .iter()
                .filter(|p| receiver.unwrap_or(nobody).is_at(p, protocol, port))
                .collect();
            if !meant || (ports.is_empty() && !rule.ports.is_empty()) {
                continue;
            }
            if rule.deny {
                return Fate::Dropped;
            }
            let proxied = ports.iter().any(|p| p.dns.is_some());
            fates.push(if proxied { Fate::Proxied } else { Fate::Passed });
        }
        if fates.contains(&Fate::Proxied) {
            Fate::Proxied
        } else if !fates.is_empty() || !sides.iter().any(|side| side.default_deny) {
            Fate::Passed
        } else if direction == INGRESS && is_node(remote) {
            // What the node itself sends needs no rule.
            Fate::Passed
        } else {
            Fate::Dropped
        }
    }

    fn selects(&self, selector: &Selector, remote: IpAddr) -> bool {
        let local = self.local(remote);
        let outside = local.is_none() && !is_node(remote);
        match selector {
            Selector::Labels(selector) => local.is_some_and(|pod| selector.matches(&pod.labels())),
            Selector::Cidr(cidr) => {
                outside
                    && cidr.prefix.contains(&remote)
                    && !cidr.except.iter().any(|except| except.contains(&remote))
            }
            Selector::Group(group) => {
                let holds = |document: &&PolicyDocument| {
                    let blocks = document.group.iter().flat_map(|group| &group.prefixes);
                    blocks.into_iter().any(|block| block.contains(&remote))
                };
                let selected = |document: &&PolicyDocument| {
                    let own = document.group.iter().flat_map(|group| &group.own);
                    let own = own.map(|(key, value)| Label::new(CIDR_GROUP, key, value));
                    let name = document.key.rsplit('/').next().map(group_label);
                    group
                        .labels
                        .matches(&LabelSet::new(own.chain(name).collect()))
                };
                let mut documents = self.policies.values().filter(holds);
                outside
                    && documents.any(|document| selected(&document))
                    && !group.except.iter().any(|except| except.contains(&remote))
            }
            Selector::Fqdn(fqdn) => {
                let live = self.pairs.keys().filter(|(_, address)| *address == remote);
                outside
                    && live
                        .clone()
                        .any(|(n, _)| matcher(fqdn).matches(&Fqdn::normalise(NAMES[*n])))
            }
            Selector::Entity(Entity::World | Entity::WorldIpv4) => outside,
            Selector::Entity(Entity::Cluster) => !outside,
            Selector::Entity(Entity::Host) => is_node(remote),
            // Nobody here is one of these.
            Selector::Entity(_) => false,
        }
    }
}

pub(super) fn matcher(selector: &FqdnSelector) -> SelectorMatcher {
    let rule = match selector {
        FqdnSelector::Name(text) => NameRule::Name(text.clone()),
        FqdnSelector::Pattern(text) => NameRule::Pattern(text.clone()),
    };
    SelectorMatcher::compile(&rule).unwrap()
}

/// A packet of an endpoint.
#[derive(Clone, Copy, Debug)]
pub(super) struct Question {
    pub(super) endpoint: EndpointId,
    pub(super) remote: IpAddr,
    pub(super) direction: u8,
    pub(super) protocol: u8,
    pub(super) port: u16,
}

pub(super) fn questions(before: &MemoryDatapath, after: &MemoryDatapath) -> Vec<Question> {
    let both = before
        .policy
        .keys()
        .filter(|id| after.policy.contains_key(*id));
    let mut found = Vec::new();
    for endpoint in both.copied() {
        // What a pod sends to itself never leaves it.
        let own = after
            .attached
            .get(&endpoint)
            .and_then(|attachment| attachment.ipv4);
        for remote in remotes().filter(|remote| own.map(IpAddr::V4) != Some(*remote)) {
            for (protocol, port) in PORTS.iter().copied() {
                for direction in [EGRESS, INGRESS] {
                    found.push(Question {
                        endpoint,
                        remote,
                        direction,
                        protocol,
                        port,
                    });
                }
            }
        }
    }
    found
}

/// What becomes of packets before and after a plan.
pub(super) struct Ends(Vec<(Question, Fate, Fate)>);

impl Ends {
    pub(super) fn new(before: &MemoryDatapath, after: &MemoryDatapath) -> Self {
        let ends = questions(before, after).into_iter();
        let ends = ends.filter_map(|q| Some((q, fate(before, q)?, fate(after, q)?)));
        Self(ends.collect())
    }

    /// A state between is no more open and no more closed than both ends: it neither passes
    /// what is dropped before and after, nor cuts what passes before and after, nor lets by
    /// the proxy what one of them sends through it and the other does not pass either.
    pub(super) fn judge(&self, state: &MemoryDatapath, at: &dyn std::fmt::Debug) {
        for (question, was, will) in &self.0 {
            let Some(is) = fate(state, *question) else {
                continue;
            };
            assert!(
                (was.min(will)..=was.max(will)).contains(&&is),
                "{question:?}: {was:?} then {is:?} then {will:?} at {at:?}"
            );
        }
    }
}

/// Every state between two steps is sound.
pub(super) fn check_way(before: &MemoryDatapath, after: &MemoryDatapath) {
    let steps = after.log.iter().skip(before.log.len());
    let ends = Ends::new(before, after);
    let mut state = MemoryDatapath {
        log: Vec::new(),
        ..before.clone()
    };
    for step in steps {
        state.apply(step).unwrap();
        ends.judge(&state, step);
    }
}

/// A packet of the pod at an address, whatever its endpoint's number.
pub(super) type Packet = (IpAddr, IpAddr, u8, u8, u16);

/// What happens to every packet in question.
pub(super) fn fates(datapath: &MemoryDatapath) -> BTreeMap<Packet, Option<Fate>> {
    let questions = questions(datapath, datapath).into_iter();
    let fates = questions.map(|q| {
        let attached = datapath.attached.get(&q.endpoint);
        let own = attached.and_then(|attachment| attachment.ipv4);
        let own = IpAddr::V4(own.expect("its programs are attached"));
        let packet = (own, q.remote, q.direction, q.protocol, q.port);
        (packet, fate(datapath, q))
    });
    fates.collect()
}

fn identity(datapath: &MemoryDatapath, address: IpAddr) -> IdentityId {
    let covering = datapath.ipcache.iter().filter_map(|(key, value)| {
        let prefix: IpNet = prefix_of(key)?;
        prefix
            .contains(&address)
            .then_some((prefix.prefix_len(), value.sec_identity))
    });
    covering
        .max()
        .map_or(IdentityId::WORLD_IPV4, |(_, id)| IdentityId(id))
}

pub(super) fn fate(datapath: &MemoryDatapath, question: Question) -> Option<Fate> {
    let map = datapath.policy.get(&question.endpoint)?;
    let lookup = |id: u32| {
        let entries = map.iter().filter(move |(key, _)| key.sec_label == id);
        longest(
            entries,
            question.direction,
            question.protocol,
            question.port,
        )
    };
    Some(match decide(lookup, identity(datapath, question.remote)) {
        None => Fate::Dropped,
        Some((_, value)) if value.is_deny() => Fate::Dropped,
        Some((_, value)) if value.proxy_port.get() != 0 => Fate::Proxied,
        Some(_) => Fate::Passed,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_history_ends_as_if_computed_from_scratch(acts in acts()) {
        let mut world = World::new();
        for act in &acts {
            world.act(act);
            world.check_end();
        }
    }
}
