//! From a policy and an answer to the ipcache.

use std::net::IpAddr;

use dns_policy::{
    boot_time::BootTime,
    mapping::{EndpointInstance, Mapping, Realised, Refusal},
    name::Fqdn,
    rule::Transport,
};
use shared_maps::{
    EndpointId, IdentityId,
    ipcache::IpcacheKey,
    policy::{EGRESS, PolicyKey},
};

use crate::{
    core::{
        Core, CoreConfig, Effect, Event, Restored,
        event::{MappingEvent, MappingResult, StreamId},
    },
    datapath::{memory::MemoryDatapath, plan::Step},
    endpoint::{config_file, spec::EndpointSpec},
    policy::parse::parse_documents,
    source_event::SourceEvent,
};

pub(super) const WEB: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: web}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toCIDR: [10.9.0.53/32]
    toPorts:
    - ports: [{port: "53", protocol: ANY}]
      rules: {dns: [{matchPattern: "*"}]}
  - toFQDNs: [{matchPattern: "*.cilium.io"}]
    toPorts: [{ports: [{port: "443", protocol: TCP}]}]
"#;

/// A core with its datapath and a clock.
pub(super) struct Node {
    pub(super) core: Core,
    pub(super) datapath: MemoryDatapath,
    pub(super) now: BootTime,
    pub(super) effects: Vec<Effect>,
}

impl Node {
    pub(super) fn new() -> Self {
        Self::with(
            CoreConfig::default(),
            Restored::default(),
            MemoryDatapath::default(),
        )
    }

    pub(super) fn with(config: CoreConfig, restored: Restored, datapath: MemoryDatapath) -> Self {
        let now = restored.now.max(BootTime(0).plus_secs(1000));
        let core = Core::new(config, Restored { now, ..restored });
        Self {
            core,
            datapath,
            now,
            effects: Vec::new(),
        }
    }

    /// Carries one event through, with all parts of it; gives the steps.
    pub(super) fn event(&mut self, event: Event) -> Vec<Step> {
        let mut steps = self.part(event);
        steps.extend(self.rest());
        steps
    }

    /// Ends a change of policy that is under way.
    pub(super) fn rest(&mut self) -> Vec<Step> {
        let mut steps = Vec::new();
        while self.core.change_in_progress() {
            let mut effects = std::mem::take(&mut self.effects);
            steps.extend(self.part(Event::ContinueChange));
            effects.append(&mut self.effects);
            self.effects = effects;
        }
        steps
    }

    /// Has changes of policy cut into parts of this size.
    pub(super) fn in_parts(&mut self, size: usize) {
        self.core.state.config.work_budget = size;
    }

    /// Carries one plan through; gives the steps.
    pub(super) fn part(&mut self, event: Event) -> Vec<Step> {
        let plan = self.core.plan(self.now, event);
        let steps = plan.steps.clone();
        let failures = plan.apply(&mut self.datapath);
        self.effects = self.core.commit(self.now, plan, &failures);
        steps
    }

    pub(super) fn policy(&mut self, text: &str) -> Vec<Step> {
        let mut steps = Vec::new();
        for document in parse_documents(text, "test") {
            steps.extend(self.event(Event::Policies(SourceEvent::Apply(document.unwrap()))));
        }
        steps
    }

    pub(super) fn endpoint(&mut self, spec: EndpointSpec) -> Vec<Step> {
        self.event(Event::Endpoints(SourceEvent::Apply(spec)))
    }

    pub(super) fn sync(&mut self) -> Vec<Step> {
        self.event(Event::Policies(SourceEvent::InitDone));
        self.event(Event::Endpoints(SourceEvent::InitDone))
    }

    pub(super) fn begin(&mut self) {
        self.event(Event::StreamUp(StreamId(1)));
        self.event(Event::Policies(SourceEvent::Init));
        self.event(Event::Endpoints(SourceEvent::Init));
    }

    /// A synced node with the usual policy and one endpoint.
    pub(super) fn usual() -> Self {
        Self::usual_with(CoreConfig::default())
    }

    pub(super) fn usual_with(config: CoreConfig) -> Self {
        Self::synced(config, WEB)
    }

    /// A synced node with a policy and one endpoint.
    pub(super) fn synced(config: CoreConfig, policy: &str) -> Self {
        let mut node = Self::with(config, Restored::default(), MemoryDatapath::default());
        node.begin();
        node.policy(policy);
        node.endpoint(spec("web", 7, "app=web"));
        node.sync();
        node
    }

    pub(super) fn learn(&mut self, name: &str, addresses: &[&str]) -> (Vec<Step>, MappingResult) {
        let mapping = mapping(self, name, addresses);
        self.mapping(mapping)
    }

    pub(super) fn mapping(&mut self, mapping: Mapping) -> (Vec<Step>, MappingResult) {
        let event = MappingEvent {
            stream: StreamId(1),
            sequence: 5,
            mapping,
        };
        let steps = self.event(Event::Mappings(vec![event]));
        let result = self.effects.iter().find_map(|effect| match effect {
            Effect::Result(result) if !result.durable => Some(result.clone()),
            _ => None,
        });
        (steps, result.expect("each mapping has a result"))
    }

    pub(super) fn tick(&mut self, at: BootTime) -> Vec<Step> {
        self.now = at;
        self.event(Event::Tick)
    }

    pub(super) fn identity(&self, address: &str) -> Option<IdentityId> {
        let address: std::net::Ipv4Addr = address.parse().unwrap();
        let value = self
            .datapath
            .ipcache
            .get(&IpcacheKey::v4(address.octets(), 32))?;
        Some(IdentityId(value.sec_identity))
    }

    pub(super) fn id(&self) -> EndpointId {
        *self.datapath.policy.keys().next().unwrap()
    }
}

pub(super) fn spec(key: &str, host: u8, label: &str) -> EndpointSpec {
    EndpointSpec {
        key: key.into(),
        labels: vec![format!("k8s:{label}")],
        ifindex: 100 + u32::from(host),
        ifname: format!("lxc{host}"),
        addresses: vec![format!("10.0.0.{host}").parse().unwrap()],
        mac: [2, 0, 0, 0, 0, host],
        node_mac: [2, 0, 0, 0, 1, host],
        on_bridge: false,
        link: crate::datapath::link::Link::default(),
        netns: "ns".into(),
        pod: None,
        pod_uid: None,
    }
}

pub(super) fn mapping(node: &Node, name: &str, addresses: &[&str]) -> Mapping {
    Mapping {
        endpoint: EndpointInstance {
            id: node.id(),
            client: "10.0.0.7".parse().unwrap(),
            ifindex: 107,
        },
        name: Fqdn::normalise(name),
        addresses: addresses
            .iter()
            .map(|a| a.parse::<IpAddr>().unwrap())
            .collect(),
        ttl: 60,
        seen_at: node.now,
        rcode: 0,
        server: "10.9.0.53:53".parse().unwrap(),
        transport: Transport::Udp,
        replayed: false,
    }
}

#[test]
fn an_answer_opens_its_address_with_one_write() {
    let mut node = Node::new();
    node.begin();
    assert!(node.policy(WEB).is_empty());
    assert!(node.endpoint(spec("web", 7, "app=web")).is_empty());
    let steps = node.sync();
    let at = |wanted: fn(&Step) -> bool| steps.iter().position(wanted).unwrap();
    let order = [
        at(|s| matches!(s, Step::Checkpoint(_))),
        at(|s| matches!(s, Step::WriteEndpoint(..))),
        at(|s| matches!(s, Step::CreatePolicyMap(_))),
        at(|s| matches!(s, Step::SetPolicy(..))),
        at(|s| matches!(s, Step::SetLxc(..))),
        at(|s| matches!(s, Step::SetIpcache(..))),
        at(|s| matches!(s, Step::Attach(_))),
    ];
    assert!(order.is_sorted(), "{order:?}");
    // The resolver learns that no document is left to be read.
    node.effects
        .retain(|effect| !matches!(effect, Effect::Resolver { .. }));
    assert!(
        matches!(node.effects.as_slice(), [Effect::Rules(rules), Effect::SnapshotReady]
        if rules.changed.len() == 1 && rules.changed[0].rules.ports.len() == 2)
    );
    let (steps, result) = node.learn("www.cilium.io", &["1.1.1.1"]);
    assert_eq!(steps.len(), 1, "{steps:?}");
    assert_eq!(result.realised, Realised::Yes);
    assert_eq!(result.lease_end, Some(node.now.plus_secs(120)));
    let identity = node.identity("1.1.1.1").unwrap();
    let key = PolicyKey::new(identity.0, EGRESS, 6, 443, 16);
    assert!(node.datapath.policy[&node.id()].contains_key(&key));
    let (steps, _) = node.learn("sub.cilium.io", &["2.2.2.2"]);
    assert!(
        matches!(steps.as_slice(), [Step::SetIpcache(..)]),
        "{steps:?}"
    );
    let (steps, result) = node.learn("other.example.com", &["3.3.3.3"]);
    assert!(steps.is_empty(), "{steps:?}");
    assert_eq!(result.realised, Realised::Yes);
}

#[test]
fn what_was_learned_becomes_durable() {
    let mut node = Node::usual();
    node.learn("www.cilium.io", &["1.1.1.1"]);
    let due = node.core.next_deadline().unwrap();
    assert!(due < node.now.plus_secs(6));
    let steps = node.tick(due);
    assert!(
        matches!(steps.as_slice(), [Step::WriteEndpoint(_, text)] if text.contains("www.cilium.io."))
    );
    assert!(matches!(node.effects.as_slice(), [Effect::Result(result)] if result.durable));
}

#[test]
fn what_an_endpoint_learns_under_new_labels_becomes_durable() {
    let mut node = Node::usual();
    let mut relabelled = spec("web", 7, "app=web");
    relabelled.labels.push("k8s:tier=front".to_owned());
    node.endpoint(relabelled);
    node.learn("www.cilium.io", &["1.1.1.1"]);
    node.tick(node.now.plus_secs(6));
    assert!(node.datapath.files[&node.id()].contains("www.cilium.io."));
}

#[test]
fn a_file_has_the_addresses_of_an_answer_together() {
    let mut node = Node::usual();
    let history = |node: &Node| {
        let text = &node.datapath.files[&node.id()];
        let history = config_file::parse(text).unwrap().history;
        let addresses = history.iter().map(|entry| entry.addresses.len());
        addresses.collect::<Vec<_>>()
    };
    node.learn("www.cilium.io", &["1.1.1.1", "1.1.1.2", "1.1.1.3"]);
    node.tick(node.now.plus_secs(6));
    assert_eq!(history(&node), [3]);
    node.learn("www.cilium.io", &["1.1.1.1"]);
    node.tick(node.now.plus_secs(12));
    assert_eq!(history(&node), [1, 2]);
}

#[test]
fn a_file_has_the_revision_of_its_rules() {
    for part in [1, usize::MAX] {
        let mut node = Node::usual();
        node.in_parts(part);
        node.policy(&WEB.replace(r#"matchPattern: "*"}"#, "matchName: www.cilium.io}"));
        let text = &node.datapath.files[&node.id()];
        assert!(text.contains("www.cilium.io"), "{text}");
        let rules = config_file::parse(text).unwrap().rules.unwrap();
        let published = node.core.summary().published_revision;
        assert_eq!(rules.revision, published, "parts of {part}");
    }
}

#[test]
fn a_pair_goes_once_lease_and_use_are_over() {
    let mut node = Node::usual_with(CoreConfig {
        max_deferred_deletes: 0,
        ..CoreConfig::default()
    });
    let learned = node.now;
    node.learn("www.cilium.io", &["1.1.1.1"]);
    node.tick(learned.plus_secs(124));
    assert!(node.identity("1.1.1.1").is_some());
    node.tick(learned.plus_secs(125));
    assert!(node.identity("1.1.1.1").is_none());
}

#[test]
fn believes_only_what_policy_allows_and_what_is_not_of_this_node() {
    let mut node = Node::usual();
    node.event(Event::NodeAddresses(vec!["10.0.0.1".parse().unwrap()]));
    assert_eq!(node.identity("10.0.0.1"), Some(IdentityId::HOST));
    let refused = |node: &mut Node, change: &dyn Fn(&mut Mapping)| {
        let mut mapping = mapping(node, "www.cilium.io", &["1.1.1.1"]);
        change(&mut mapping);
        let (steps, result) = node.mapping(mapping);
        assert!(steps.is_empty(), "{steps:?}");
        result.realised
    };
    let unknown = Realised::No(Refusal::EndpointUnknown);
    assert_eq!(refused(&mut node, &|m| m.endpoint.ifindex = 1), unknown);
    assert_eq!(
        refused(&mut node, &|m| m.endpoint.client =
            "10.0.0.8".parse().unwrap()),
        unknown
    );
    assert_eq!(refused(&mut node, &|m| m.seen_at = BootTime(1)), unknown);
    let denied = Realised::No(Refusal::NotAllowed);
    assert_eq!(
        refused(&mut node, &|m| m.server = "10.9.0.54:53".parse().unwrap()),
        denied
    );
    assert_eq!(
        refused(&mut node, &|m| m.server = "10.9.0.53:5353".parse().unwrap()),
        denied
    );
    let invalid = Realised::No(Refusal::Invalid);
    assert_eq!(refused(&mut node, &|m| m.addresses.clear()), invalid);
    assert_eq!(refused(&mut node, &|m| m.rcode = 3), invalid);
    for address in [
        "10.0.0.1",
        "10.0.0.7",
        "127.0.0.1",
        "224.0.0.1",
        "0.0.0.0",
        "::ffff:1.2.3.4",
        "::1",
    ] {
        let result = refused(&mut node, &|m| m.addresses = vec![address.parse().unwrap()]);
        assert_eq!(result, Realised::Yes, "{address}");
    }
    assert_eq!(node.identity("10.0.0.1"), Some(IdentityId::HOST));
}

#[test]
fn one_stream_cannot_flood() {
    let mut node = Node::usual_with(CoreConfig {
        mapping_rate: 1,
        ..CoreConfig::default()
    });
    let results: Vec<_> = (0..11)
        .map(|_| node.learn("www.cilium.io", &["1.1.1.1"]).1.realised)
        .collect();
    assert_eq!(results[9], Realised::Yes);
    assert_eq!(results[10], Realised::No(Refusal::RateLimited));
}

#[test]
fn the_directory_says_what_the_snapshot_says() {
    let mut node = Node::usual();
    node.learn("www.cilium.io", &["1.1.1.1"]);
    let (directory, snapshot) = (node.core.directory(), node.core.snapshot());
    let identities: Vec<u32> = snapshot.identities.iter().map(|view| view.id).collect();
    let found: Vec<u32> = directory.identities.iter().map(|id| id.0).collect();
    assert_eq!(found, identities);
    let prefixes = snapshot.ipcache.iter();
    let prefixes: Vec<_> = prefixes
        .map(|view| (view.prefix.clone(), view.realised.unwrap_or(view.identity)))
        .collect();
    let found = directory.prefixes.iter();
    let found: Vec<_> = found
        .map(|(prefix, id)| (prefix.to_string(), id.0))
        .collect();
    assert_eq!(found, prefixes);
    let [location] = directory.locations.as_slice() else {
        panic!("{directory:?}");
    };
    assert_eq!(location.id.0, snapshot.endpoints[0].id);
    assert_eq!(location.identity.0, snapshot.endpoints[0].identity);
    assert_eq!(location.ifindex, 107);
    assert_eq!(location.addresses, ["10.0.0.7".parse::<IpAddr>().unwrap()]);
}
