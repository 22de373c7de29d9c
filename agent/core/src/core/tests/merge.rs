//! Mappings of proxies may come in any order, more than once and over any stream: names, labels
//! and leases end up the same.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use dns_policy::{
    boot_time::BootTime,
    mapping::{Mapping, Realised, Refusal},
    name::Fqdn,
};
use proptest::prelude::*;

use super::scenario::{Node, mapping, spec};
use crate::{
    core::{
        CoreConfig, Event, Restored,
        event::{MappingEvent, StreamId},
    },
    datapath::memory::MemoryDatapath,
};

const NAMES: [&str; 4] = ["www.cilium.io", "dev.cilium.io", "a.test", "ebpf.io"];
const ADDRESSES: [&str; 5] = ["1.1.1.1", "1.1.1.2", "2.2.2.2", "2001:db8::1", "10.0.0.7"];
const POLICY: &str = r#"
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
  - toFQDNs: [{matchPattern: "*.cilium.io"}, {matchName: www.cilium.io}, {matchName: a.test}]
"#;

#[derive(Clone, Debug)]
struct Reported {
    host: u8,
    name: usize,
    addresses: Vec<usize>,
    ttl: u32,
    /// How many seconds ago the answer was seen.
    seen: u64,
    replayed: bool,
    stream: u64,
}

fn reported() -> impl Strategy<Value = Reported> {
    let ttl = prop_oneof![Just(0u32), 1u32..200, Just(u32::MAX)];
    let seen = prop_oneof![Just(0u64), 0u64..300];
    (
        7u8..9,
        0..NAMES.len(),
        prop::collection::vec(0..ADDRESSES.len(), 1..4),
        ttl,
        seen,
        any::<bool>(),
        1u64..4,
    )
        .prop_map(
            |(host, name, addresses, ttl, seen, replayed, stream)| Reported {
                host,
                name,
                addresses,
                ttl,
                seen,
                replayed,
                stream,
            },
        )
}

/// A lookup: expiry, instant, TTL.
type Lookup = (BootTime, BootTime, u32);

/// Everything that mappings change, except the records of the order in which it changed.
#[derive(Debug, PartialEq)]
struct LearnedState {
    lookups: BTreeMap<(u16, Fqdn, IpAddr), Lookup>,
    /// Without `delete_pending`, the latest expiry that was noticed: it depends on the order, and only
    /// delays the run that releases the zombie.
    zombies: BTreeMap<(u16, IpAddr), BTreeSet<Fqdn>>,
    pairs: BTreeMap<(Fqdn, IpAddr), (u32, Option<BootTime>)>,
    labels: BTreeMap<String, Vec<String>>,
}

fn learned_state(node: &Node) -> LearnedState {
    let names = &node.core.state.learned.names;
    let (mut lookups, mut zombies) = (BTreeMap::new(), BTreeMap::new());
    for (id, of) in names.endpoints() {
        for (name, addresses) in &of.names {
            for (address, lookup) in addresses {
                let value = (lookup.expires, lookup.seen, lookup.ttl);
                lookups.insert((id.0, name.clone(), *address), value);
            }
        }
        for (address, zombie) in &of.zombies {
            zombies.insert((id.0, *address), zombie.names.clone());
        }
    }
    let pairs = names.names().flat_map(|(name, entry)| {
        let pairs = entry.pairs.iter();
        pairs.map(move |(address, pair)| ((name.clone(), *address), (pair.owners, pair.lease_end)))
    });
    let pairs = pairs.collect();
    let snapshot = node.core.snapshot();
    let identities: BTreeMap<_, _> = snapshot
        .identities
        .iter()
        .map(|identity| (identity.id, &identity.labels))
        .collect();
    let entries = snapshot.ipcache.iter();
    let labels = entries.map(|entry| {
        let identity = entry.realised.unwrap_or_default();
        let mut labels = identities.get(&identity).map(|l| l.to_vec());
        labels.iter_mut().for_each(|labels| labels.sort());
        (entry.prefix.clone(), labels.unwrap_or_default())
    });
    LearnedState {
        lookups,
        zombies,
        pairs,
        labels: labels.collect(),
    }
}

fn node(min_ttl: u32, zombies: usize) -> Node {
    let config = CoreConfig {
        min_ttl,
        max_deferred_deletes: zombies,
        ..CoreConfig::default()
    };
    let mut node = Node::with(config, Restored::default(), MemoryDatapath::default());
    node.begin();
    for stream in 2..4 {
        node.event(Event::StreamUp(StreamId(stream)));
    }
    node.policy(POLICY);
    node.endpoint(spec("7", 7, "app=web"));
    node.endpoint(spec("8", 8, "app=web"));
    node.sync();
    node.now = node.now.plus_secs(1000);
    node.event(Event::Tick);
    node
}

fn event(node: &Node, item: &Reported) -> MappingEvent {
    let addresses: Vec<&str> = item.addresses.iter().map(|n| ADDRESSES[*n]).collect();
    let mut mapping: Mapping = mapping(node, NAMES[item.name], &addresses);
    let snapshot = node.core.snapshot();
    let key = item.host.to_string();
    let own = snapshot.endpoints.iter().find(|e| e.key == key).unwrap();
    mapping.endpoint.id.0 = own.id;
    mapping.endpoint.ifindex = 100 + u32::from(item.host);
    mapping.endpoint.client = IpAddr::from([10, 0, 0, item.host]);
    mapping.ttl = item.ttl;
    mapping.seen_at = BootTime::from_nanos(node.now.nanos() - item.seen * 1_000_000_000);
    mapping.replayed = item.replayed;
    MappingEvent {
        stream: StreamId(item.stream),
        sequence: 1,
        mapping,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn any_order_any_repetition_any_stream(
        items in prop::collection::vec(reported(), 1..20),
        order in prop::collection::vec((any::<prop::sample::Index>(), 1u64..4, 1usize..6), 0..40),
        min_ttl in prop_oneof![Just(0u32), Just(30), Just(3600)],
        zombies in prop_oneof![Just(0usize), Just(10_000)],
    ) {
        let mut one = node(min_ttl, zombies);
        for item in &items {
            let event = event(&one, item);
            one.event(Event::Mappings(vec![event]));
            for effect in &one.effects {
                if let crate::core::Effect::Result(result) = effect {
                    // A mapping that has expired before it is sent opens nothing.
                    let over = Realised::No(Refusal::NotRealised);
                    prop_assert!([Realised::Yes, over].contains(&result.realised));
                }
            }
        }
        one.event(Event::Tick);

        // Some of the mappings, repeated and in other batches; then all of them backwards.
        let mut other = node(min_ttl, zombies);
        let mut batch = Vec::new();
        for (index, stream, size) in &order {
            let mut event = event(&other, index.get(&items));
            event.stream = StreamId(*stream);
            batch.push(event);
            if batch.len() >= *size {
                other.event(Event::Mappings(std::mem::take(&mut batch)));
            }
        }
        batch.extend(items.iter().rev().map(|item| event(&other, item)));
        other.event(Event::Mappings(batch));
        other.event(Event::Tick);
        prop_assert_eq!(learned_state(&one), learned_state(&other));

        // All mappings once more: nothing changes, and nothing is written.
        let before = learned_state(&other);
        for item in &items {
            let event = event(&other, item);
            let steps = other.event(Event::Mappings(vec![event]));
            prop_assert!(steps.is_empty(), "{steps:?}");
        }
        other.event(Event::Tick);
        prop_assert_eq!(before, learned_state(&other));
    }
}
