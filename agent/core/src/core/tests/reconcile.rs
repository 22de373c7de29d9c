//! Map entries that something else wrote are put right and counted. Entries that only the agent
//! writes never differ.

use std::collections::BTreeMap;

use proptest::prelude::*;
use shared_maps::{
    EndpointId, IdentityId,
    ipcache::{IpcacheKey, IpcacheValue},
    lxc::{LxcKey, LxcValue},
    policy::{EGRESS, PolicyKey, PolicyValue},
};

use super::{
    oracle::{World, acts},
    scenario::{Node, spec},
};
use crate::{
    core::{Event, snapshot::Reconciled},
    datapath::{
        map_query::{BATCH, MapEntries, MapQuery, ProgramFault},
        memory::MemoryDatapath,
        plan::Datapath as _,
    },
    ipcache::table::prefix_of,
    source_event::SourceEvent,
};

/// Runs the reconciler once over everything and returns all differences found so far.
fn run(node: &mut Node) -> Reconciled {
    let before = counted(node).passes;
    for _ in 0..10_000 {
        let query = next_query(node);
        let entries = node.datapath.read_entries(&query).unwrap();
        if node.core.reconcile(Some(entries)) > 0 {
            node.tick(node.now);
        }
        if counted(node).passes > before {
            return counted(node);
        }
    }
    panic!("a run does not end");
}

fn next_query(node: &mut Node) -> MapQuery {
    loop {
        node.now = node.now.max(node.core.query_due().unwrap());
        if let Some(query) = node.core.next_query(node.now) {
            return query;
        }
    }
}

fn counted(node: &Node) -> Reconciled {
    node.core.summary().counters.reconciled
}

/// The maps as the programs read them: an entry with the value of the next wider one changes no answer,
/// and no look-up shows whether it is there.
fn maps(datapath: &MemoryDatapath) -> impl PartialEq + std::fmt::Debug + use<> {
    let ipcache = &datapath.ipcache;
    let around = |key: &IpcacheKey| {
        let wanted = prefix_of(key).unwrap();
        let wider = ipcache.iter().filter_map(|(other, value)| {
            let prefix = prefix_of(other).unwrap();
            (prefix.contains(&wanted) && prefix != wanted).then_some((prefix.prefix_len(), value))
        });
        wider.max_by_key(|(len, _)| *len).map(|(_, value)| value)
    };
    let entries = ipcache
        .iter()
        .filter(|(key, value)| around(key) != Some(*value));
    let entries: BTreeMap<IpcacheKey, IpcacheValue> =
        entries.map(|(key, value)| (*key, *value)).collect();
    (entries, datapath.policy.clone(), datapath.lxc.clone())
}

#[test]
fn what_something_else_wrote_is_mended_and_counted() {
    let mut node = Node::usual();
    node.learn("www.cilium.io", &["1.1.1.1", "1.1.1.2"]);
    let before = maps(&node.datapath);
    assert_eq!(run(&mut node).differences(), 0);
    let (id, name) = (node.id(), node.identity("1.1.1.1").unwrap());
    let ipcache = &mut node.datapath.ipcache;
    // Entries that are wrong, missing, without an owner, and right except for a flag.
    let world = IpcacheValue {
        sec_identity: IdentityId::WORLD.0,
        ..IpcacheValue::default()
    };
    ipcache.insert(IpcacheKey::v4([1, 1, 1, 1], 32), world);
    ipcache.remove(&IpcacheKey::v4([1, 1, 1, 2], 32)).unwrap();
    let open = IpcacheValue {
        sec_identity: name.0,
        ..IpcacheValue::default()
    };
    ipcache.insert(IpcacheKey::v4([6, 6, 6, 0], 24), open);
    let pod = ipcache.get_mut(&IpcacheKey::v4([10, 0, 0, 7], 32)).unwrap();
    pod.flags = 1;
    let policy = node.datapath.policy.get_mut(&id).unwrap();
    let allowed = PolicyKey::new(name.0, EGRESS, 6, 443, 16);
    policy.remove(&allowed).unwrap();
    let any = PolicyKey::new(IdentityId::WORLD_IPV4.0, EGRESS, 0, 0, 0);
    policy.insert(any, PolicyValue::allow(any));
    node.datapath
        .lxc
        .remove(&LxcKey::v4([10, 0, 0, 7]))
        .unwrap();
    let nobody = LxcValue {
        lxc_id: 99,
        ..LxcValue::default()
    };
    node.datapath.lxc.insert(LxcKey::v4([10, 0, 0, 99]), nobody);
    let found = run(&mut node);
    assert_eq!(maps(&node.datapath), before);
    assert_eq!(
        (found.ipcache, found.policy, found.lxc, found.names),
        (4, 2, 2, 0)
    );
    assert_eq!(run(&mut node).differences(), found.differences());
}

/// Answers queries until the programs are queried, and reports another program as the first at both
/// hooks.
fn overtaken(node: &mut Node) -> u64 {
    let fault = |program| ProgramFault::NotFirst {
        program,
        first: "other, number 7".to_owned(),
    };
    faulty(node, &[fault("from_pod"), fault("to_pod")])
}

/// Answers queries until the programs are queried, and reports these faults for each endpoint.
fn faulty(node: &mut Node, faults: &[ProgramFault]) -> u64 {
    loop {
        let MapQuery::Programs(wanted) = next_query(node) else {
            let nothing = node.core.reconcile(Some(MapEntries::Nothing));
            assert_eq!(nothing, 0);
            continue;
        };
        let faults = wanted.iter().map(|a| (a.endpoint, faults.to_vec()));
        let repaired = node
            .core
            .reconcile(Some(MapEntries::Programs(faults.collect())));
        node.tick(node.now);
        return repaired;
    }
}

#[test]
fn programs_that_are_not_attached_any_more_are_attached_again_and_counted() {
    let mut node = Node::usual();
    let id = node.id();
    let attached = node.datapath.attached.clone();
    node.datapath.attached.clear();
    let start = node.now;
    while node.datapath.attached.is_empty() {
        let query = next_query(&mut node);
        let entries = node.datapath.read_entries(&query).unwrap();
        if node.core.reconcile(Some(entries)) > 0 {
            node.tick(node.now);
        }
        assert!(node.now < start.plus_secs(5), "too late");
    }
    assert_eq!(node.datapath.attached, attached);
    assert_eq!(counted(&node).programs, 1);
    assert!(node.datapath.attached.contains_key(&id));
}

#[test]
fn an_interface_that_is_gone_is_not_counted_as_a_repair() {
    let mut node = Node::usual();
    let gone = vec![(node.id(), vec![ProgramFault::NoInterface(7)])];
    while !matches!(next_query(&mut node), MapQuery::Programs(_)) {
        node.core.reconcile(Some(MapEntries::Nothing));
    }
    assert_eq!(node.core.reconcile(Some(MapEntries::Programs(gone))), 0);
    assert_eq!(counted(&node).programs, 0);
}

#[test]
fn the_first_place_is_taken_back_a_few_times_and_then_given_up_for_a_while() {
    let mut node = Node::usual();
    let taken: Vec<u64> = (0..5).map(|_| overtaken(&mut node)).collect();
    assert_eq!(taken, [1, 1, 1, 0, 0]);
    let problems = node.core.summary().endpoint_problems;
    assert!(
        problems
            .iter()
            .any(|p| p.contains("other, number 7") && p.contains("stop")),
        "{problems:?}"
    );
    node.now = node.now.plus_secs(61);
    assert_eq!(overtaken(&mut node), 1);
}

#[test]
fn programs_that_cannot_be_looked_at_are_attached_again_a_few_times_only() {
    let mut node = Node::usual();
    let fault = ProgramFault::Unknown {
        program: "from_pod",
        reason: "Operation not permitted".to_owned(),
    };
    let repair = |node: &mut Node| faulty(node, std::slice::from_ref(&fault));
    let repaired: Vec<u64> = (0..5).map(|_| repair(&mut node)).collect();
    assert_eq!(repaired, [1, 1, 1, 0, 0]);
    let problems = node.core.summary().endpoint_problems;
    assert!(
        problems.iter().any(|p| p.contains("not permitted")),
        "{problems:?}"
    );
    node.now = node.now.plus_secs(61);
    assert_eq!(repair(&mut node), 1);
}

#[test]
fn programs_that_are_not_attached_are_attached_each_time_whatever_else_is_wrong() {
    let mut node = Node::usual();
    let faults = [
        ProgramFault::NotFirst {
            program: "from_pod",
            first: "other, number 7".to_owned(),
        },
        ProgramFault::Detached { program: "to_pod" },
    ];
    let repaired: Vec<u64> = (0..5).map(|_| faulty(&mut node, &faults)).collect();
    assert_eq!(repaired, [1; 5]);
}

#[test]
fn nothing_is_looked_at_before_the_sources_are_synced() {
    let mut node = Node::new();
    node.begin();
    assert_eq!(node.core.query_due(), None);
    assert_eq!(node.core.next_query(node.now.plus_secs(1000)), None);
}

#[test]
fn a_look_that_fails_is_counted_and_the_pass_goes_on() {
    let mut node = Node::usual();
    for _ in 0..400 {
        next_query(&mut node);
        assert_eq!(node.core.reconcile(None), 0);
    }
    let counted = counted(&node);
    assert!(counted.passes > 5 && counted.failures == 400, "{counted:?}");
}

#[test]
fn an_endpoint_that_goes_while_a_pass_is_under_way_is_not_looked_for() {
    let mut node = Node::usual();
    node.endpoint(spec("other", 8, "app=web"));
    for queries in 0..20 {
        node.endpoint(spec("gone", 9, "app=web"));
        for _ in 0..queries {
            let query = next_query(&mut node);
            let entries = node.datapath.read_entries(&query).unwrap();
            node.core.reconcile(Some(entries));
        }
        node.event(Event::Endpoints(SourceEvent::Delete("gone".to_owned())));
        assert_eq!(run(&mut node).differences(), 0);
    }
}

/// The kernel begins a walk again when the entry it stands on is removed.
#[test]
fn a_walk_that_is_sent_back_for_ever_ends() {
    let mut node = Node::usual();
    let entry = |n: usize| {
        let host = u8::try_from(n % 200).unwrap();
        (IpcacheKey::v4([10, 9, 0, 53], 32), host)
    };
    let same = node.datapath.ipcache[&entry(0).0];
    let again: Vec<_> = (0..BATCH).map(|n| (entry(n).0, Some(same))).collect();
    for _ in 0..100 {
        node.now = node.core.query_due().unwrap();
        let query = node.core.next_query(node.now).unwrap();
        if !matches!(query, crate::datapath::map_query::MapQuery::IpcacheAfter(_)) {
            return;
        }
        node.core
            .reconcile(Some(MapEntries::Ipcache(again.clone())));
    }
    panic!("the walk goes on");
}

#[test]
fn a_map_of_many_batches_is_compared_whole() {
    let mut node = Node::usual();
    let addresses: Vec<String> = (0..1000)
        .map(|n| format!("9.9.{}.{}", n / 200, n % 200))
        .collect();
    for part in addresses.chunks(500) {
        let addresses: Vec<&str> = part.iter().map(String::as_str).collect();
        node.learn("www.cilium.io", &addresses);
    }
    let before = maps(&node.datapath);
    assert_eq!(run(&mut node).differences(), 0);
    node.datapath
        .ipcache
        .retain(|key, _| key.ip[0] != 9 || key.ip[3] % 3 > 0);
    let found = run(&mut node);
    assert_eq!(found.ipcache, 335);
    assert_eq!(maps(&node.datapath), before);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn what_the_agent_wrote_is_as_it_should_be(acts in acts()) {
        let mut world = World::new();
        for act in &acts {
            world.act(act);
            let found = run(&mut world.node);
            prop_assert_eq!(found.differences(), 0, "{:?} after {:?}", found, act);
        }
    }

    #[test]
    fn whatever_is_written_besides_is_put_right(
        acts in acts(),
        scribbles in prop::collection::vec((any::<prop::sample::Index>(), 0u8..6), 1..8),
    ) {
        let mut world = World::new();
        for act in &acts {
            world.act(act);
        }
        let node = &mut world.node;
        run(node);
        // Nothing else must happen meanwhile.
        let soon = node.now.plus_secs(2);
        prop_assume!(node.core.next_deadline().is_none_or(|at| at > soon));
        let before = maps(&node.datapath);
        for (at, how) in &scribbles {
            scribble(&mut node.datapath, at, *how);
        }
        let differs = maps(&node.datapath) != before;
        let found = run(node);
        prop_assert_eq!(maps(&node.datapath), before, "{:?}", found);
        prop_assert!(!differs || found.differences() > 0);
    }
}

fn scribble(datapath: &mut MemoryDatapath, at: &prop::sample::Index, how: u8) {
    let mut keys: Vec<IpcacheKey> = datapath.ipcache.keys().copied().collect();
    keys.sort_unstable();
    let numbers: Vec<u32> = datapath.ipcache.values().map(|v| v.sec_identity).collect();
    let number = at.get(&numbers);
    let value = IpcacheValue {
        sec_identity: *number,
        ..IpcacheValue::default()
    };
    match how {
        0 => {
            datapath.ipcache.remove(at.get(&keys));
        }
        1 => {
            datapath.ipcache.insert(*at.get(&keys), value);
        }
        2 => {
            let [one, two, ..] = at.index(60_000).to_be_bytes();
            datapath
                .ipcache
                .insert(IpcacheKey::v4([7, one, two, 0], 24), value);
        }
        _ => {
            let ids: Vec<EndpointId> = datapath.policy.keys().copied().collect();
            if ids.is_empty() {
                return;
            }
            let map = datapath.policy.get_mut(at.get(&ids)).unwrap();
            let keys: Vec<PolicyKey> = map.keys().copied().collect();
            let new = PolicyKey::new(*number, EGRESS, 6, 1000, 16);
            match (how, keys.is_empty()) {
                (3, false) => map.remove(at.get(&keys)),
                (4, false) => {
                    let key = *at.get(&keys);
                    map.insert(key, PolicyValue::deny(key))
                }
                _ => map.insert(new, PolicyValue::allow(new)),
            };
        }
    }
}
