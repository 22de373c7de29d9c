//! The agent's core with a datapath in memory and a clock that the caller sets. Benchmarks and
//! soaks use it to simulate hours in seconds.

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use agent_core::{
    core::{
        Core, CoreConfig, Effect, Event, Restored,
        event::{MappingEvent, StreamId},
        snapshot::Counters,
    },
    datapath::memory::MemoryDatapath,
    endpoint::spec::{EndpointSpec, PodInterface},
    policy::{document::PolicyDocument, parse::parse_documents},
    source_event::SourceEvent,
};
use anyhow::{Context, Result, ensure};
use dns_policy::{
    boot_time::BootTime,
    mapping::{EndpointInstance, Mapping, Realised},
    name::Fqdn,
    rule::Transport,
};

use shared_maps::EndpointId;

/// Address of the DNS server in every policy.
pub const DNS: &str = "192.0.2.53";
const STREAM: StreamId = StreamId(1);
/// Interface of the first endpoint.
const FIRST_INTERFACE: u32 = 100;

/// The core and its datapath.
#[derive(Debug)]
pub struct Node {
    pub core: Core,
    /// The datapath that the core writes to.
    pub datapath: MemoryDatapath,
    /// The time that the caller set.
    pub now: BootTime,
    sequence: u64,
    endpoints: Vec<EndpointId>,
}

/// Time that the core needs for one event, and its result.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    /// Time for plans and commits. The datapath's steps do not count.
    pub time: Duration,
    /// Time of the longest plan with its steps. Another event may have to wait this long.
    pub longest: Duration,
    /// Number of mappings of the event that were realised.
    pub realised: u64,
}

/// Settings with room for the workloads. Leases and limits have their defaults.
pub fn config() -> CoreConfig {
    CoreConfig {
        enable_ipv6: false,
        mapping_rate: u32::MAX / 16,
        ipcache_max: 1 << 21,
        max_pairs_per_endpoint: 1 << 21,
        ..CoreConfig::default()
    }
}

/// The default settings of the product, with one address family.
pub(crate) fn config_by_default() -> CoreConfig {
    CoreConfig {
        enable_ipv6: false,
        ..CoreConfig::default()
    }
}

impl Node {
    /// A synchronised core with these documents, and one endpoint for each list of labels.
    pub fn start(
        config: CoreConfig,
        policies: &[PolicyDocument],
        endpoints: &[Vec<String>],
    ) -> Result<Self> {
        let now = BootTime::START.plus_secs(1000);
        let restored = Restored {
            now,
            ..Restored::default()
        };
        let datapath = MemoryDatapath {
            forgetful: true,
            ..MemoryDatapath::default()
        };
        let mut node = Self {
            core: Core::new(config, restored),
            datapath,
            now,
            sequence: 0,
            endpoints: Vec::new(),
        };
        node.event(Event::StreamUp(STREAM));
        node.event(Event::Policies(SourceEvent::Init));
        for document in policies {
            node.event(Event::Policies(SourceEvent::Apply(document.clone())));
        }
        node.event(Event::Policies(SourceEvent::InitDone));
        node.event(Event::Endpoints(SourceEvent::Init));
        for (index, labels) in (0..).zip(endpoints) {
            let spec = spec(index, labels.clone());
            node.event(Event::Endpoints(SourceEvent::Apply(spec)));
        }
        node.event(Event::Endpoints(SourceEvent::InitDone));
        node.endpoints = node
            .core
            .locations()
            .iter()
            .map(|location| location.id)
            .collect();
        ensure!(node.endpoints.len() == endpoints.len(), "endpoints refused");
        let snapshot = node.core.snapshot();
        let problem = snapshot.endpoints.iter().find_map(|e| e.problem.as_ref());
        ensure!(problem.is_none(), "{problem:?}");
        ensure!(snapshot.rejected.is_empty(), "{:?}", snapshot.rejected);
        Ok(node)
    }

    /// Handles one event and all events that follow from it.
    pub fn event(&mut self, event: Event) -> Cost {
        let mut total = self.part(event);
        while self.core.change_in_progress() {
            let cost = self.part(Event::ContinueChange);
            total.time += cost.time;
            total.longest = total.longest.max(cost.longest);
        }
        total
    }

    /// Handles one event with one plan: plan, steps, commit.
    pub fn part(&mut self, event: Event) -> Cost {
        let start = Instant::now();
        let plan = self.core.plan(self.now, event);
        let planned = start.elapsed();
        let failures = plan.apply(&mut self.datapath);
        let applied = start.elapsed();
        let effects = self.core.commit(self.now, plan, &failures);
        let longest = start.elapsed();
        let realised = effects.iter().filter(|effect| match effect {
            Effect::Result(result) => result.realised == Realised::Yes && !result.durable,
            _ => false,
        });
        Cost {
            time: planned + (longest - applied),
            longest,
            realised: realised.count() as u64,
        }
    }

    /// Handles an answer to one of the endpoints, by its index in the list.
    pub fn answer(
        &mut self,
        endpoint: usize,
        name: &str,
        addresses: Vec<IpAddr>,
        ttl: u32,
    ) -> Result<MappingEvent> {
        let index = endpoint % self.endpoints.len();
        let id = *self.endpoints.get(index).context("no endpoint")?;
        self.sequence += 1;
        let location = u32::try_from(index)?;
        Ok(MappingEvent {
            stream: STREAM,
            sequence: self.sequence,
            mapping: Mapping {
                endpoint: EndpointInstance {
                    id,
                    client: client(location),
                    ifindex: FIRST_INTERFACE + location,
                },
                name: Fqdn::normalise(name),
                addresses,
                ttl,
                seen_at: self.now,
                rcode: 0,
                server: format!("{DNS}:53").parse()?,
                transport: Transport::Udp,
                replayed: false,
            },
        })
    }

    pub fn counters(&self) -> Counters {
        self.core.summary().counters
    }

    /// Number of node-local identities, as in the core's summary.
    pub fn identities(&self) -> u64 {
        self.core.summary().local_identities as u64
    }

    /// Puts a document in force, or a new version of it.
    pub fn apply(&mut self, document: &PolicyDocument) -> Cost {
        self.event(Event::Policies(SourceEvent::Apply(document.clone())))
    }
}

/// Parses a text with exactly one policy document.
pub fn document(text: &str) -> Result<PolicyDocument> {
    let mut found = parse_documents(text, "bench");
    ensure!(found.len() == 1, "{} documents", found.len());
    Ok(found.remove(0)?)
}

/// Labels of a pod `app: web`. With a number, the pod also has a label of its own.
pub fn web(number: Option<usize>) -> Vec<String> {
    let mut labels = vec![
        "k8s:app=web".to_owned(),
        "k8s:io.kubernetes.pod.namespace=default".to_owned(),
    ];
    labels.extend(number.map(|number| format!("k8s:pod=p{number}")));
    labels
}

/// Address of an endpoint, by its index in the list.
pub fn client(index: u32) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from_bits(0xac10_0000 + index + 1))
}

fn spec(index: u32, labels: Vec<String>) -> EndpointSpec {
    let [a, b, c, d] = index.to_be_bytes();
    EndpointSpec {
        key: format!("pod{index}"),
        labels,
        interface: PodInterface {
            ifindex: FIRST_INTERFACE + index,
            ifname: format!("lxc{index}"),
            mac: [2, 0, a, b, c, d],
            node_mac: [2, 1, a, b, c, d],
            on_bridge: false,
            link: Default::default(),
        },
        addresses: vec![client(index)],
        netns: format!("pod{index}"),
        pod: None,
        pod_uid: None,
    }
}
