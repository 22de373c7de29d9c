//! Programs of the earlier run, which are replaced one by one after the sync.

use std::collections::BTreeSet;

use super::{
    oracle::{Pod, World, config},
    restart::{again, left_behind},
    scenario::Node,
};
use crate::{
    core::{Effect, Event, Restored},
    datapath::{
        memory::MemoryDatapath,
        plan::{Datapath as _, Step, StepError},
    },
};

const HOSTS: [u8; 3] = [7, 8, 9];

fn three() -> World {
    let mut world = World::new();
    for host in [8, 9] {
        let event = world.host(host, Some(Pod::WEB));
        world.node.event(event);
    }
    world.node.tick(world.node.now.plus_secs(6));
    world
}

/// The next run, which finds the programs of `judged` in force.
fn next(world: &World, judged: impl Fn(u32) -> bool) -> Node {
    let before = &world.node;
    let attached = before.datapath.attached.iter();
    let attached = attached.map(|(id, attachment)| (*id, attachment.ifindex));
    let restored = Restored {
        now: before.now.plus_secs(2),
        under_programs: attached.filter(|(_, ifindex)| judged(*ifindex)).collect(),
        ..left_behind(&before.datapath, &[107, 108, 109])
    };
    let datapath = MemoryDatapath {
        log: Vec::new(),
        ..before.datapath.clone()
    };
    let mut node = Node::with(config(), restored, datapath);
    node.begin();
    node
}

fn attaches(steps: &[Step]) -> Vec<u32> {
    let attaches = steps.iter().filter_map(|step| match step {
        Step::Attach(attachment) => Some(attachment.ifindex),
        _ => None,
    });
    attaches.collect()
}

#[test]
fn answers_do_not_wait_for_the_programs_of_all_endpoints() {
    let world = three();
    let mut node = next(&world, |_| true);
    world.replay(&mut node);
    let steps = node.sync();
    assert_eq!(attaches(&steps), Vec::<u32>::new());
    let is_ready = |effect: &Effect| matches!(effect, Effect::SnapshotReady);
    assert!(node.effects.iter().any(is_ready), "the agent is not ready");
    let mut replaced = BTreeSet::new();
    for _ in HOSTS {
        // A mapping between two of these plans attaches no programs.
        let (steps, _) = node.learn("www.cilium.io", &["1.1.1.1"]);
        assert_eq!(attaches(&steps), Vec::<u32>::new());
        assert!(node.core.next_deadline().unwrap() <= node.now);
        let steps = node.tick(node.now);
        let [ifindex] = attaches(&steps)[..] else {
            panic!("{steps:?}");
        };
        replaced.insert(ifindex);
    }
    assert_eq!(replaced, [107, 108, 109].into());
    assert!(node.core.next_deadline().unwrap() > node.now);
    assert_eq!(attaches(&node.tick(node.now)), Vec::<u32>::new());
}

#[test]
fn an_endpoint_without_all_programs_or_that_changed_gets_them_with_the_first_plan() {
    let world = three();
    let mut node = next(&world, |ifindex| ifindex != 108);
    world.replay(&mut node);
    assert_eq!(attaches(&node.sync()), [108]);

    let mut node = next(&world, |_| true);
    world.replay(&mut node);
    // Another address at the same interface.
    let mut moved = Pod::WEB.spec(9);
    moved.addresses = vec!["10.0.0.99".parse().unwrap()];
    node.endpoint(moved);
    assert_eq!(attaches(&node.sync()), [109]);

    let mut datapath = world.node.datapath.clone();
    let lost = world.node.datapath.policy.keys().next().copied().unwrap();
    let ifindex = datapath.attached[&lost].ifindex;
    datapath.policy.remove(&lost);
    let mut without_map = three();
    without_map.node.datapath = datapath;
    let mut node = next(&without_map, |_| true);
    world.replay(&mut node);
    assert_eq!(attaches(&node.sync()), [ifindex]);
}

#[test]
fn programs_that_cannot_be_replaced_are_tried_again_like_any_step() {
    let world = three();
    let mut node = next(&world, |_| true);
    world.replay(&mut node);
    node.sync();
    let plan = node.core.plan(node.now, Event::Tick);
    let failures = (0..plan.steps.len()).map(|at| (at, StepError::Skipped));
    let failures: Vec<_> = failures.collect();
    let failed = attaches(&plan.steps);
    node.core.commit(node.now, plan, &failures);
    // Every plan tries the failed step again, and no plan is made only for it before its time.
    let mut again = Vec::new();
    for tick in 0.. {
        assert!(tick < 3, "a hot loop");
        again.extend(attaches(&node.tick(node.now)));
        if node.core.next_deadline().unwrap() > node.now {
            break;
        }
    }
    assert!(again.contains(&failed[0]), "{again:?}");
    assert_eq!(node.datapath.attached.len(), HOSTS.len());
}

/// Cut before each step after the sync: the next run ends in the same state as an uncut one.
#[test]
fn killed_while_programs_are_replaced() {
    let world = three();
    let mut node = next(&world, |_| true);
    world.replay(&mut node);
    node.sync();
    let at_sync = node.datapath.clone();
    let mut steps = Vec::new();
    for _ in HOSTS {
        steps.extend(node.tick(node.now));
    }
    let end = node.datapath.clone();
    for cut in 0..=steps.len() {
        let mut killed = three();
        killed.node.datapath = at_sync.clone();
        for step in steps.iter().take(cut) {
            killed.node.datapath.apply(step).unwrap();
        }
        let mut node = again(&killed.node, config(), &[107, 108, 109]);
        node.begin();
        world.replay(&mut node);
        node.sync();
        assert_eq!(node.datapath.attached, end.attached, "cut {cut}");
        assert_eq!(node.datapath.policy, end.policy, "cut {cut}");
        assert_eq!(node.datapath.ipcache, end.ipcache, "cut {cut}");
        assert_eq!(node.datapath.lxc, end.lxc, "cut {cut}");
    }
}
