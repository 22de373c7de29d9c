//! Random histories, compared with a verdict worked out from scratch. Every state on the way is
//! judged: the agent may stop between any two map operations.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use dns_policy::{boot_time::BootTime, name::Fqdn, rule::NameRule};
use proptest::{prelude::*, sample::select};
use serde_json::Value;
use shared_maps::{
    EndpointId, IdentityId,
    policy::{EGRESS, INGRESS},
};

pub(super) use super::super::testing::policy::{document, matcher};
use super::{
    random_network_policies::policy,
    scenario::{Node, spec},
};
use crate::{
    core::{CoreConfig, Event, Restored},
    datapath::memory::MemoryDatapath,
    fqdn::servers::NameServers,
    labels::LabelSet,
    policy::{
        cidr_group::group_key,
        compute::dns_rules,
        document::PolicyDocument,
        mode::PolicyMode,
        model::EndpointPolicy,
        parse::parse_documents,
        trace::{FlowDirection, Port, Verdict},
    },
    selector::selector::{Selector, fqdn_label},
    source_event::SourceEvent,
};

mod answers;
mod cluster;
mod firewalls;
mod language;
mod network_policies;
mod packets;
mod pod;
mod reading;

use self::{
    answers::{TRUSTED, UNTRUSTED},
    language::{
        ADDRESSES, Addresses, CLUSTER, NAMES, NODE, PORTS, SERVICES, TEAMS, VOCABULARY, remotes,
    },
};
pub(super) use self::{
    cluster::{Cluster, ClusterPod},
    firewalls::FirewallRule,
    language::{Group, ServicePort, Spec},
    packets::{Ends, Fate, Question, check_way, fate, fates, identity, questions},
    pod::{DEFAULT, Pod},
};

/// A policy that is always there, so that answers are accepted.
const DNS: &str = r"
  endpointSelector: {}
  egress:
  - toCIDR: [10.9.0.53/32, 10.9.0.54/32]
    toPorts: [{ports: [{port: 53}], rules: {dns: [{matchPattern: '*'}]}}]
  enableDefaultDeny: {egress: false}
";

#[derive(Clone, Debug)]
pub(super) enum Act {
    /// The document `p<number>` has this content now.
    Policy(u8, Spec),
    /// The document `p<number>` is removed.
    Drop(u8),
    /// The group `g<number>` has this content now, or is removed.
    Group(u8, Option<Group>),
    /// The other node has these addresses now.
    Node(Addresses),
    /// The API servers have these addresses now.
    ApiServers(Addresses),
    /// The NetworkPolicy `n<number>` is this one now, or is removed.
    NetworkPolicy(u8, Option<Value>),
    /// The EgressFirewall of the namespace has these rules now, or is removed.
    Firewall(&'static str, Option<Vec<FirewallRule>>),
    /// The endpoint 10.0.0.`<number>` is this pod now.
    Endpoint(u8, Pod),
    /// The endpoint 10.0.0.`<number>` is removed.
    Gone(u8),
    /// The cluster's pod `p<number>` is this one now, or is removed.
    ClusterPod(u8, Option<ClusterPod>),
    /// The namespace's label `team` has this value now, or the namespace is removed.
    Team(Option<&'static str>),
    /// The Service has these ports and backends now, or is removed.
    Service(Option<&'static [ServicePort]>),
    /// Endpoint 7 receives an answer: name and address.
    Learn(&'static str, &'static str),
    /// Endpoint 7 receives an answer of a server that does not count.
    Poison(&'static str, &'static str),
    /// This number of seconds passes.
    Wait(u64),
}

pub(super) fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        4 => (0u8..4, select(Spec::ALL)).prop_map(|(slot, spec)| Act::Policy(slot, spec)),
        1 => (0u8..4).prop_map(Act::Drop),
        2 => (0u8..2, prop::option::weighted(0.8, select(Group::ALL))).prop_map(|(slot, group)| Act::Group(slot, group)),
        1 => select(CLUSTER).prop_map(Act::Node),
        1 => select(CLUSTER).prop_map(Act::ApiServers),
        4 => (0u8..3, prop::option::weighted(0.8, policy(VOCABULARY))).prop_map(|(slot, policy)| Act::NetworkPolicy(slot, policy)),
        4 => firewalls::firewall().prop_map(|(namespace, rules)| Act::Firewall(namespace, rules)),
        2 => (7u8..10, pod::pod()).prop_map(|(host, pod)| Act::Endpoint(host, learning(host, pod))),
        1 => (8u8..10).prop_map(Act::Gone),
        3 => (0u8..3, prop::option::weighted(0.8, cluster::cluster_pod())).prop_map(|(n, pod)| Act::ClusterPod(n, pod)),
        1 => prop::option::weighted(0.8, select(TEAMS)).prop_map(Act::Team),
        3 => prop::option::weighted(0.8, select(SERVICES)).prop_map(Act::Service),
        4 => (select(NAMES), select(ADDRESSES)).prop_map(|(n, a)| Act::Learn(n, a)),
        2 => (select(NAMES), select(ADDRESSES)).prop_map(|(n, a)| Act::Poison(n, a)),
        2 => (1u64..150).prop_map(Act::Wait),
    ];
    prop::collection::vec(act, 1..25)
}

/// Acts of a cluster under NetworkPolicies.
fn cluster_acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        6 => (0u8..3, prop::option::weighted(0.8, policy(VOCABULARY))).prop_map(|(slot, policy)| Act::NetworkPolicy(slot, policy)),
        1 => (0u8..4, select(Spec::ALL)).prop_map(|(slot, spec)| Act::Policy(slot, spec)),
        2 => firewalls::firewall().prop_map(|(namespace, rules)| Act::Firewall(namespace, rules)),
        3 => (7u8..10, pod::pod()).prop_map(|(host, pod)| Act::Endpoint(host, learning(host, pod))),
        3 => (0u8..3, prop::option::weighted(0.8, cluster::cluster_pod())).prop_map(|(n, pod)| Act::ClusterPod(n, pod)),
        2 => prop::option::weighted(0.6, select(TEAMS)).prop_map(Act::Team),
        2 => prop::option::weighted(0.8, select(SERVICES)).prop_map(Act::Service),
    ];
    prop::collection::vec(act, 8..25)
}

/// The endpoint that learns names stays in the namespace of the policies that allow it to learn.
fn learning(host: u8, pod: Pod) -> Pod {
    match host {
        7 => Pod {
            namespace: DEFAULT,
            ..pod
        },
        _ => pod,
    }
}

/// Budgets for a part of a change of policy: for one thing at a time, for some things, for
/// everything.
pub(super) fn parts() -> impl Strategy<Value = usize> {
    select(vec![1, 20, usize::MAX])
}

/// The world as the test knows it.
pub(super) struct World {
    pub(super) node: Node,
    policies: BTreeMap<String, PolicyDocument>,
    network_policies: BTreeMap<u8, Value>,
    firewalls: BTreeMap<&'static str, Vec<FirewallRule>>,
    endpoints: BTreeMap<u8, Pod>,
    cluster: Cluster,
    /// Addresses of the other node, and of the API servers.
    nodes: Addresses,
    api_servers: Addresses,
    pairs: BTreeMap<(&'static str, IpAddr), BootTime>,
}

fn node_addresses() -> Event {
    Event::NodeAddresses(vec![NODE.parse().unwrap()])
}

fn parse(addresses: Addresses) -> impl Iterator<Item = IpAddr> {
    addresses.iter().map(|text| text.parse().unwrap())
}

fn is_node(address: IpAddr) -> bool {
    address == NODE.parse::<IpAddr>().unwrap()
}

pub(super) fn config() -> CoreConfig {
    CoreConfig {
        dns_servers: vec![TRUSTED.parse().unwrap()],
        name_servers: NameServers::Trusted,
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
            network_policies: BTreeMap::new(),
            firewalls: BTreeMap::new(),
            endpoints: [(7, Pod::WEB)].into(),
            cluster: Cluster::new(),
            nodes: &[],
            api_servers: &[],
            pairs: BTreeMap::new(),
        }
    }

    /// Carries out an act, and checks the states on the way.
    pub(super) fn act(&mut self, act: &Act) {
        let event = match act {
            Act::Policy(slot, spec) => self.document(&format!("p{slot}"), Some(spec.text())),
            Act::Drop(slot) => self.document(&format!("p{slot}"), None),
            Act::Group(slot, group) => self.group(&format!("g{slot}"), *group),
            Act::Node(at) => self.node_at(at),
            Act::ApiServers(at) => self.api_servers_at(at),
            Act::NetworkPolicy(slot, policy) => {
                let events = self.network_policy(*slot, policy.as_ref());
                self.events(events);
                return;
            }
            Act::Firewall(namespace, rules) => self.firewall(namespace, rules.as_deref()),
            Act::Endpoint(host, pod) => self.host(*host, Some(*pod)),
            Act::Gone(host) => self.host(*host, None),
            Act::ClusterPod(number, pod) => {
                let events = self.cluster.pod(*number, *pod);
                self.events(events);
                return;
            }
            Act::Team(team) => {
                let events = self.cluster.team(*team);
                self.events(events);
                return;
            }
            Act::Service(ports) => {
                let events = self.cluster.serve(*ports);
                self.events(events);
                return;
            }
            Act::Learn(name, address) => {
                self.learn(name, address, TRUSTED);
                return;
            }
            Act::Poison(name, address) => {
                self.learn(name, address, UNTRUSTED);
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

    fn events(&mut self, events: Vec<Event>) {
        for event in events {
            let before = self.node.datapath.clone();
            self.node.event(event);
            check_way(&before, &self.node.datapath);
        }
    }

    /// Adds or changes a document (`Some`), or removes it.
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

    /// Adds or changes a group of blocks (`Some`), or removes it.
    fn group(&mut self, name: &str, group: Option<Group>) -> Event {
        Event::Policies(match group {
            Some(Group { labels, blocks }) => {
                let text = format!(
                    r"
apiVersion: cilium.io/v2
kind: CiliumCIDRGroup
metadata: {{name: {name}, labels: {labels}}}
spec: {{externalCIDRs: {blocks}}}
"
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

    /// Gives another node these addresses.
    fn node_at(&mut self, at: Addresses) -> Event {
        self.nodes = at;
        let addresses = at.iter().map(|a| format!("{{type: InternalIP, ip: {a}}}"));
        let addresses: Vec<String> = addresses.collect();
        let addresses = addresses.join(", ");
        self.object(&format!(
            r"
apiVersion: cilium.io/v2
kind: CiliumNode
metadata: {{name: other}}
spec: {{addresses: [{addresses}]}}
"
        ))
    }

    /// Gives the API servers these addresses.
    fn api_servers_at(&mut self, at: Addresses) -> Event {
        self.api_servers = at;
        let endpoints = at.iter().map(|a| format!("{{addresses: [{a}]}}"));
        let endpoints: Vec<String> = endpoints.collect();
        let endpoints = endpoints.join(", ");
        self.object(&format!(
            r"
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: kubernetes, labels: {{kubernetes.io/service-name: kubernetes}}}}
endpoints: [{endpoints}]
"
        ))
    }

    fn object(&mut self, text: &str) -> Event {
        let document = parse_documents(text, "test").remove(0).unwrap();
        self.policies.insert(document.key.clone(), document.clone());
        Event::Policies(SourceEvent::Apply(document))
    }

    /// Whether an address is another node's.
    fn is_other_node(&self, address: IpAddr) -> bool {
        self.pod_at(address).is_none() && parse(self.nodes).any(|a| a == address)
    }

    /// Adds, changes or removes an endpoint.
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

    /// Sends all objects of the sources to another run of the agent.
    pub(super) fn replay(&self, node: &mut Node) {
        node.event(node_addresses());
        for event in self.cluster.replay() {
            node.event(event);
        }
        for document in self.policies.values() {
            node.event(Event::Policies(SourceEvent::Apply(document.clone())));
        }
        for (slot, policy) in &self.network_policies {
            node.event(network_policies::applied(*slot, policy));
        }
        for (host, pod) in &self.endpoints {
            node.endpoint(pod.spec(*host));
        }
    }

    /// Checks that the maps give the verdicts that a reading of the policies from scratch gives.
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
                        assert_eq!(
                            self.explained(question),
                            Some(shall),
                            "explained: {question:?}"
                        );
                    }
                }
            }
        }
        self.check_names();
        self.check_no_other_names();
        self.check_dns();
        for endpoint in &self.node.core.snapshot().endpoints {
            assert!(IdentityId(endpoint.identity).is_endpoint());
        }
    }

    /// What happens to a packet by the verdict that `why` gives.
    fn explained(&self, question: Question) -> Option<Fate> {
        let direction = match question.direction {
            EGRESS => FlowDirection::Egress,
            _ => FlowDirection::Ingress,
        };
        let port = Port {
            protocol: question.protocol,
            number: question.port,
        };
        let peer = identity(&self.node.datapath, question.remote);
        let found = self
            .node
            .core
            .peer(question.endpoint, direction, peer, Some(port));
        Some(match found.verdict? {
            Verdict::Denied | Verdict::NoRule => Fate::Dropped,
            Verdict::Proxied => Fate::Proxied,
            Verdict::Allowed | Verdict::NotRestricted | Verdict::FromNode => Fate::Passed,
        })
    }

    /// Checks that the proxies' rules are those of the policies read from scratch. A subject whose
    /// rules are marked as out of date is left out.
    fn check_dns(&self) {
        let state = &self.node.core.state;
        for (_, subject) in state
            .policy
            .subjects()
            .filter(|(_, subject)| !subject.dns_is_dirty())
        {
            let policy = EndpointPolicy::of(subject.labels(), state.policy.repository());
            let services = subject.dns_services(state.policy.services());
            assert_eq!(
                **subject.dns(),
                dns_rules(&policy, state.policy.selectors(), &services)
            );
        }
    }

    /// Checks that the ipcache has each address of a live and selected name, with all labels of the
    /// name.
    fn check_names(&self) {
        let snapshot = self.node.core.snapshot();
        for (name, address) in self.pairs.keys() {
            if self.pod_at(*address).is_some() || self.is_other_node(*address) {
                continue;
            }
            let name = Fqdn::normalise(name);
            let selectors = self.selectors();
            let matching: BTreeSet<_> = selectors
                .iter()
                .filter(|s| matcher(s).matches(&name))
                .map(fqdn_label)
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

    fn selectors(&self) -> Vec<NameRule> {
        let rules = self.policies.values().flat_map(|document| document.rules());
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

    /// The pod at an address, here or elsewhere in the cluster.
    fn pod_at(&self, address: IpAddr) -> Option<Pod> {
        let own = self.local(address);
        own.or_else(|| self.cluster.at(address))
    }

    /// Labels of the pod at an address.
    fn labels_at(&self, address: IpAddr) -> Option<LabelSet> {
        let own = self.local(address).map(Pod::labels);
        own.or_else(|| Some(self.cluster.labels(self.cluster.at(address)?)))
    }
}

/// Plays a history, and checks the maps after each act.
fn play(acts: &[Act], part: usize) {
    let mut world = World::new();
    world.node.in_parts(part);
    for act in acts {
        world.act(act);
        world.check_end();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_history_ends_as_if_computed_from_scratch(acts in acts(), part in parts()) {
        play(&acts, part);
    }

    #[test]
    fn every_history_of_network_policies_ends_as_if_computed_from_scratch(
        acts in cluster_acts(),
        part in parts(),
    ) {
        play(&acts, part);
    }
}

/// The proxy judges queries to the Service's port too, besides those to the ports of DNS rules.
#[test]
fn dns_rules_follow_a_policy_about_the_port_of_a_service() {
    let restricted = serde_json::json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"namespace": DEFAULT},
        "spec": {"podSelector": {}, "policyTypes": ["Egress"]},
    });
    let mut world = World::new();
    for act in [
        Act::NetworkPolicy(0, Some(restricted)),
        Act::Service(Some(&[(6, 443, 53, &["10.9.0.53"])])),
        Act::Policy(0, Spec::WebToWwwOnPorts443To450),
        Act::Drop(0),
    ] {
        world.act(&act);
        world.check_end();
    }
}
