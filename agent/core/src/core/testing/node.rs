//! A core with its datapath in memory, and what tests send it.

use std::net::IpAddr;

use dns_policy::{
    boot_time::BootTime,
    mapping::{EndpointInstance, Mapping},
    name::Fqdn,
    rule::Transport,
};
use shared_maps::{EndpointId, IdentityId, ipcache::IpcacheKey};

use crate::{
    core::{
        Core, CoreConfig, Effect, Event, Restored,
        event::{MappingEvent, MappingResult, StreamId},
    },
    datapath::{memory::MemoryDatapath, plan::Step},
    endpoint::spec::{EndpointSpec, PodInterface},
    policy::parse::parse_documents,
    source_event::SourceEvent,
};

/// The usual policy: DNS, and the names under cilium.io on port 443.
pub const WEB: &str = r#"
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
pub struct Node {
    pub core: Core,
    pub datapath: MemoryDatapath,
    pub now: BootTime,
    pub effects: Vec<Effect>,
}

impl Node {
    pub fn new() -> Self {
        Self::with(
            CoreConfig::default(),
            Restored::default(),
            MemoryDatapath::default(),
        )
    }

    pub fn with(config: CoreConfig, restored: Restored, datapath: MemoryDatapath) -> Self {
        let now = restored.now.max(BootTime::START.plus_secs(1000));
        let core = Core::new(config, Restored { now, ..restored });
        Self {
            core,
            datapath,
            now,
            effects: Vec::new(),
        }
    }

    /// Carries out one event, with all parts of the change. Returns the steps.
    pub fn event(&mut self, event: Event) -> Vec<Step> {
        let mut steps = self.part(event);
        steps.extend(self.rest());
        steps
    }

    /// Carries out the rest of a change of policy that is under way.
    pub fn rest(&mut self) -> Vec<Step> {
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
    pub fn in_parts(&mut self, size: usize) {
        self.core.state.config.work_budget = size;
    }

    /// Carries out one plan. Returns the steps.
    pub fn part(&mut self, event: Event) -> Vec<Step> {
        let plan = self.core.plan(self.now, event);
        let steps = plan.steps.clone();
        let failures = plan.apply(&mut self.datapath);
        self.effects = self.core.commit(self.now, plan, &failures);
        steps
    }

    pub fn policy(&mut self, text: &str) -> Vec<Step> {
        let mut steps = Vec::new();
        for document in parse_documents(text, "test") {
            steps.extend(self.event(Event::Policies(SourceEvent::Apply(document.unwrap()))));
        }
        steps
    }

    pub fn endpoint(&mut self, spec: EndpointSpec) -> Vec<Step> {
        self.event(Event::Endpoints(SourceEvent::Apply(spec)))
    }

    pub fn sync(&mut self) -> Vec<Step> {
        self.event(Event::Policies(SourceEvent::InitDone));
        self.event(Event::Endpoints(SourceEvent::InitDone))
    }

    pub fn begin(&mut self) {
        self.event(Event::StreamUp(StreamId(1)));
        self.event(Event::Policies(SourceEvent::Init));
        self.event(Event::Endpoints(SourceEvent::Init));
    }

    /// A synced node with the usual policy and one endpoint.
    pub fn usual() -> Self {
        Self::usual_with(CoreConfig::default())
    }

    pub fn usual_with(config: CoreConfig) -> Self {
        Self::synced(config, WEB)
    }

    /// A synced node with a policy and one endpoint.
    pub fn synced(config: CoreConfig, policy: &str) -> Self {
        let mut node = Self::with(config, Restored::default(), MemoryDatapath::default());
        node.begin();
        node.policy(policy);
        node.endpoint(spec("web", 7, "app=web"));
        node.sync();
        node
    }

    pub fn learn(&mut self, name: &str, addresses: &[&str]) -> (Vec<Step>, MappingResult) {
        let mapping = mapping(self, name, addresses);
        self.mapping(mapping)
    }

    pub fn mapping(&mut self, mapping: Mapping) -> (Vec<Step>, MappingResult) {
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

    pub fn tick(&mut self, at: BootTime) -> Vec<Step> {
        self.now = at;
        self.event(Event::Tick)
    }

    pub fn identity(&self, address: &str) -> Option<IdentityId> {
        let address: std::net::Ipv4Addr = address.parse().unwrap();
        let value = self
            .datapath
            .ipcache
            .get(&IpcacheKey::v4(address.octets(), 32))?;
        Some(IdentityId(value.sec_identity))
    }

    pub fn id(&self) -> EndpointId {
        *self.datapath.policy.keys().next().unwrap()
    }
}

pub fn spec(key: &str, host: u8, label: &str) -> EndpointSpec {
    EndpointSpec {
        key: key.into(),
        labels: vec![format!("k8s:{label}")],
        interface: PodInterface {
            ifindex: 100 + u32::from(host),
            ifname: format!("lxc{host}"),
            mac: [2, 0, 0, 0, 0, host],
            node_mac: [2, 0, 0, 0, 1, host],
            on_bridge: false,
            link: Default::default(),
        },
        addresses: vec![format!("10.0.0.{host}").parse().unwrap()],
        netns: "ns".into(),
        pod: None,
        pod_uid: None,
    }
}

pub fn mapping(node: &Node, name: &str, addresses: &[&str]) -> Mapping {
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
