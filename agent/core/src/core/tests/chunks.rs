//! Large changes are made in chunks: the identities in use are at any time the old ones and those
//! of one chunk.

use std::collections::BTreeSet;

use super::{
    restart::again,
    scenario::{Node, spec},
};
use crate::{
    core::{
        CoreConfig,
        event::{MappingEvent, StreamId},
    },
    datapath::{memory::MemoryDatapath, plan::Datapath as _},
};

/// Number of prefixes in one chunk.
const CHUNK: usize = 512;
/// Number of names, each with an address. Policy selects each name separately, so that each address has
/// an identity of its own.
const NAMES: usize = 1300;

fn document(name: &str, rules: &str) -> String {
    format!(
        r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {{name: {name}}}
spec:
  endpointSelector: {{}}
  egress:
{rules}"
    )
}

fn each_name() -> String {
    let names = (0..NAMES).map(|n| format!("{{matchName: n{n}.test}}"));
    let names: Vec<String> = names.collect();
    let dns = "  - toCIDR: [10.9.0.53/32]\n    toPorts: [{ports: [{port: 53}], rules: {dns: [{matchPattern: '*'}]}}]";
    document(
        "each",
        &format!("{dns}\n  - toFQDNs: [{}]", names.join(", ")),
    )
}

/// The broad selector that gives every name's address another identity.
fn all_names() -> String {
    document("all", "  - toFQDNs: [{matchPattern: '*'}]")
}

fn config() -> CoreConfig {
    CoreConfig {
        preallocate_identities: false,
        ..CoreConfig::default()
    }
}

fn node() -> Node {
    let mut node = Node::synced(config(), &each_name());
    let mapping = |n: usize| {
        let address = format!("20.0.{}.{}", n / 256, n % 256);
        MappingEvent {
            stream: StreamId(1),
            sequence: 1,
            mapping: super::scenario::mapping(&node, &format!("n{n}.test"), &[&address]),
        }
    };
    let mappings: Vec<_> = (0..NAMES).map(mapping).collect();
    node.event(crate::core::Event::Mappings(mappings));
    assert!(identities(&node.datapath).len() > NAMES);
    node
}

/// Identities that any map knows.
fn identities(datapath: &MemoryDatapath) -> BTreeSet<u32> {
    let ipcache = datapath.ipcache.values().map(|value| value.sec_identity);
    let policy = datapath.policy.values().flatten();
    ipcache
        .chain(policy.map(|(key, _)| key.sec_label))
        .collect()
}

/// Maximum number of identities that maps know at once on the way from `before`.
fn most(before: &MemoryDatapath, after: &MemoryDatapath) -> usize {
    let steps = after.log.iter().skip(before.log.len());
    let mut state = MemoryDatapath {
        log: Vec::new(),
        ..before.clone()
    };
    let mut most = 0;
    for (n, step) in steps.enumerate() {
        state.apply(step).unwrap();
        // Each step adds at most one identity.
        if n % 16 == 0 {
            most = most.max(identities(&state).len() + 16);
            state.log.clear();
        }
    }
    most
}

fn stays_within_a_chunk(before: &MemoryDatapath, after: &MemoryDatapath) {
    let (old, new) = (identities(before), identities(after));
    let replaced = old.difference(&new).count();
    assert_eq!(replaced, NAMES, "every name's address has another identity");
    let most = most(before, after);
    assert!(most > old.len() + CHUNK / 2, "the test sees the chunks");
    assert!(
        most <= old.len() + CHUNK + 16,
        "{most} identities at once, {} before",
        old.len()
    );
}

#[test]
fn a_selector_that_renumbers_everything_takes_a_chunk_more() {
    let mut node = node();
    node.in_parts(usize::MAX);
    let before = node.datapath.clone();
    node.policy(&all_names());
    stays_within_a_chunk(&before, &node.datapath);
    assert_eq!(node.core.summary().local_identities, NAMES + 1);
}

#[test]
fn a_selector_that_came_while_the_agent_was_away_takes_a_chunk_more() {
    let mut node = node();
    node.tick(node.now.plus_secs(20));
    let mut node = again(&node, config(), &[107]);
    node.begin();
    node.policy(&each_name());
    node.policy(&all_names());
    node.endpoint(spec("web", 7, "app=web"));
    let before = node.datapath.clone();
    node.sync();
    stays_within_a_chunk(&before, &node.datapath);
}
