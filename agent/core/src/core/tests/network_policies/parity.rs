//! Random policies: the maps let pass what the documents allow.

use proptest::{prelude::*, strategy::ValueTree as _, test_runner::TestRunner};

use super::{
    delete,
    world::{NAMESPACES, PODS, VOCABULARY, World, apply},
};
use crate::core::tests::random_network_policies::{policies, policy};

/// Number of sets of policies, and of packets judged under each.
const SETS: usize = 1_000;
const PACKETS: usize = 1_000;
/// Number of changes of one cluster, and of packets judged after each.
const CHANGES: usize = 500;
const PACKETS_AFTER_A_CHANGE: usize = 200;

#[test]
fn maps_let_pass_what_the_documents_allow() {
    let mut runner = TestRunner::deterministic();
    let mut passed = 0;
    for _ in 0..SETS {
        let world = World::new(
            &policies(VOCABULARY)
                .new_tree(&mut runner)
                .unwrap()
                .current(),
        );
        passed += world.judge(&world.node(), PACKETS, &mut runner);
    }
    // Neither answer is rare.
    let share = passed * 100 / (SETS * PACKETS);
    assert!((20..=80).contains(&share), "{share} of 100 packets pass");
}

#[test]
fn after_each_change_maps_let_pass_what_the_documents_allow() {
    let mut runner = TestRunner::deterministic();
    let change = (
        0..10,
        policy(VOCABULARY),
        0..6,
        0..PODS.len(),
        0..PODS.len(),
    );
    let mut world = World::new(&[]);
    let mut node = world.node();
    for n in 0..CHANGES {
        node.in_parts([1, 20, usize::MAX][n % 3]);
        let drawn = change.new_tree(&mut runner).unwrap().current();
        let (act, policy, slot, pod, row) = drawn;
        let name = format!("p{slot}");
        match act {
            0..4 => {
                // A policy of another namespace is another document.
                remove(&mut world, &mut node, &name);
                apply(&mut node, &name, &policy);
                world.policies.insert(name, policy);
            }
            4..6 => remove(&mut world, &mut node, &name),
            6..9 => world.change_pod(&mut node, pod, row),
            _ => {
                let count = NAMESPACES.len();
                world.change_namespace(&mut node, pod % count, row % count);
            }
        }
        world.judge(&node, PACKETS_AFTER_A_CHANGE, &mut runner);
    }
}

fn remove(world: &mut World, node: &mut super::Node, name: &str) {
    if let Some(policy) = world.policies.remove(name) {
        let namespace = policy["metadata"]["namespace"].as_str().unwrap();
        delete(node, namespace, name);
    }
}
