//! Events of proxies between two parts of a change of policy.

use dns_policy::{boot_time::BootTime, mapping::Realised};

use super::{
    cuts::{NEW, meaning, old, publishes},
    oracle::{World, fate, questions},
    scenario::{Node, WEB, mapping, spec},
};
use crate::{
    core::{
        Effect, Event,
        event::{MappingEvent, MappingResult, StreamId},
    },
    datapath::{memory::MemoryDatapath, plan::Datapath as _, plan::Step},
};

/// Learns an address for endpoint 7 that no endpoint has learned yet. Returns the result.
fn learn(node: &mut Node) -> MappingResult {
    let event = MappingEvent {
        stream: StreamId(1),
        sequence: 5,
        mapping: mapping(node, "www.cilium.io", &["1.1.1.200"]),
    };
    node.part(Event::Mappings(vec![event]));
    let result = node.effects.iter().find_map(|effect| match effect {
        Effect::Result(result) if !result.durable => Some(result.clone()),
        _ => None,
    });
    result.expect("each mapping has a result")
}

type Change = (&'static str, Option<&'static str>);

/// The maps with and without the change, each with and without the mapping.
fn corners((name, text): Change) -> [MemoryDatapath; 4] {
    [(false, false), (false, true), (true, false), (true, true)].map(|(changed, learned)| {
        let mut world = old();
        if changed {
            let event = world.document(name, text);
            world.node.event(event);
        }
        if learned {
            learn(&mut world.node);
        }
        world.node.datapath
    })
}

/// Learns a mapping after the first part and `parts` further ones; `None` if the change has no part
/// left then.
fn interleaved((name, text): Change, parts: usize) -> Option<(World, MemoryDatapath)> {
    let mut world = old();
    world.node.in_parts(1);
    let before = world.node.datapath.clone();
    let revision = world.node.core.snapshot().summary.revision;
    let event = world.document(name, text);
    world.node.part(event);
    for _ in 0..parts {
        if !world.node.core.change_in_progress() {
            return None;
        }
        world.node.part(Event::ContinueChange);
        assert_eq!(
            publishes(&world.node.effects),
            !world.node.core.change_in_progress()
        );
    }
    if !world.node.core.change_in_progress() {
        return None;
    }
    let result = learn(&mut world.node);
    assert_eq!(result.realised, Realised::Yes, "{name} {parts}");
    assert_eq!(result.revision, revision, "{name} {parts}");
    assert!(result.lease_end.is_some(), "{name} {parts}");
    assert!(!publishes(&world.node.effects), "{name} {parts}");
    world.node.rest();
    assert!(publishes(&world.node.effects), "{name} {parts}");
    Some((world, before))
}

#[test]
fn a_mapping_between_any_two_parts_of_a_change() {
    for change in [("new", Some(NEW)), ("old", Some(NEW)), ("gone", None)] {
        let corners = corners(change);
        let [first, .., last] = &corners;
        // No state is more open or more closed than all four corners.
        let bounds = questions(first, last).into_iter().filter_map(|question| {
            let fates = corners.each_ref().map(|end| fate(end, question));
            Some((question, *fates.iter().min()?, *fates.iter().max()?))
        });
        let bounds: Vec<_> = bounds.collect();
        let mut parts = 0;
        while let Some((world, before)) = interleaved(change, parts) {
            assert_eq!(meaning(&world.node.datapath), meaning(last), "{parts}");
            let mut state = before.clone();
            for step in world.node.datapath.log.iter().skip(before.log.len()) {
                state.apply(step).unwrap();
                for (question, low, high) in &bounds {
                    let is = fate(&state, *question);
                    assert!(
                        (low..=high).contains(&&is),
                        "{question:?}: {is:?} at {step:?}, {change:?} after {parts}"
                    );
                }
            }
            parts += 1;
        }
        assert!(parts > 4, "{change:?} has {parts} parts");
    }
}

#[test]
fn endpoints_change_one_by_one_and_an_answer_is_not_held_up() {
    let mut node = Node::usual();
    for host in [8, 9] {
        node.endpoint(spec(&host.to_string(), host, "app=web"));
    }
    node.in_parts(1);
    let narrower = WEB.replace(
        "{port: \"443\", protocol: TCP}",
        "{port: \"80\", protocol: TCP}",
    );
    let [document] = crate::policy::parse::parse_documents(&narrower, "test")
        .try_into()
        .unwrap();
    let mut seen = std::collections::BTreeSet::new();
    let event = crate::source_event::SourceEvent::Apply(document.unwrap());
    node.part(Event::Policies(event));
    let mut host = 1;
    loop {
        let has = |map: &std::collections::BTreeMap<shared_maps::policy::PolicyKey, _>| {
            map.keys().any(|key| key.dport.get() == 80)
        };
        seen.insert(node.datapath.policy.values().filter(|map| has(map)).count());
        if !node.core.change_in_progress() {
            break;
        }
        let mapping = mapping(&node, "www.cilium.io", &[&format!("1.1.1.{host}")]);
        let event = MappingEvent {
            stream: StreamId(1),
            sequence: host,
            mapping,
        };
        let steps = node.part(Event::Mappings(vec![event]));
        // The mapping's plan does nothing that the change still has to do.
        assert!(
            matches!(steps.as_slice(), [Step::SetIpcache(..)]),
            "{steps:?}"
        );
        node.part(Event::ContinueChange);
        host += 1;
    }
    assert_eq!(seen, [0, 1, 2, 3].into());
}

#[test]
fn rules_wait_if_any_part_failed() {
    let mut world = old();
    world.node.in_parts(1);
    let event = world.document("new", Some(NEW));
    world.node.part(event);
    world.node.datapath.fail = Some(|step| matches!(step, Step::SetPolicy(..)));
    let mut failed = 0;
    while world.node.core.change_in_progress() {
        let before = world.node.core.summary().counters.step_failures;
        world.node.part(Event::ContinueChange);
        failed += u64::from(world.node.core.summary().counters.step_failures > before);
        if failed > 0 {
            world.node.datapath.fail = None;
        }
        assert!(!publishes(&world.node.effects));
    }
    assert_eq!(failed, 1);
    let later: BootTime = world.node.now.plus_secs(2);
    world.node.tick(later);
    assert!(publishes(&world.node.effects));
    world.check_end();
}
