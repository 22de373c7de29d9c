//! Enforcement by identities agrees with enforcement by addresses, except where a block covers a
//! pod.

use std::net::IpAddr;

use netpol::{
    cache::Object,
    node::{Node, Surroundings},
};
use proptest::{
    strategy::{Strategy as _, ValueTree as _},
    test_runner::TestRunner,
};

use super::world::{VOCABULARY, World};
use crate::core::tests::random_network_policies::policies;

const SETS: usize = 1_000;
const PACKETS: usize = 1_000;

#[test]
fn netpol_parity() {
    let mut runner = TestRunner::deterministic();
    let around = Surroundings {
        node_interfaces: ["uplink".to_owned()].into(),
        ..Surroundings::default()
    };
    let (mut judged, mut differ) = (0, 0);
    for _ in 0..SETS {
        let drawn = policies(VOCABULARY).new_tree(&mut runner).unwrap();
        let world = World::new(&drawn.current());
        let objects = world.objects();
        let node = Node::new("one", &objects, &around).unwrap();
        for (packet, passes) in world.packets(&world.node(), PACKETS, &mut runner) {
            let verdicts = node.judge(&packet);
            let (_, first) = &verdicts[0];
            assert!(
                verdicts
                    .iter()
                    .all(|(_, verdict)| verdict.passes == first.passes)
            );
            judged += 1;
            if first.passes == passes {
                continue;
            }
            differ += 1;
            // Identities of pods are in no block: a packet of a pod that only a block lets pass,
            // passes by addresses only.
            let ends = [packet.source, packet.destination];
            let is_covered = ends.iter().any(|address| is_in_a_block(&objects, *address));
            assert!(first.passes && is_covered, "{packet:?} by {objects:#?}");
        }
    }
    assert!(judged >= SETS * PACKETS * 3 / 4, "{judged}");
    assert!(
        (1..judged / 10).contains(&differ),
        "{differ} of {judged} differ"
    );
}

/// Whether a pod has the address, and a block of a policy covers it.
fn is_in_a_block(objects: &[Object], address: IpAddr) -> bool {
    let is_pod =
        |object: &Object| matches!(object, Object::Pod(pod) if pod.addresses.contains(&address));
    let covers = |object: &Object| match object {
        Object::Policy(policy) => policy.blocks().any(|block| {
            block.prefix().contains(&address)
                && !block.except().iter().any(|part| part.contains(&address))
        }),
        _ => false,
    };
    objects.iter().any(is_pod) && objects.iter().any(covers)
}
