//! What happens to packets on the way from one state of the maps to another.

use std::{collections::BTreeMap, net::IpAddr};

use shared_maps::policy::{EGRESS, INGRESS};

use super::language::{PORTS, remotes};
pub(in crate::core::tests) use crate::core::testing::packets::{Fate, Question, fate, identity};
use crate::datapath::{memory::MemoryDatapath, plan::Datapath as _};

pub(in crate::core::tests) fn questions(
    before: &MemoryDatapath,
    after: &MemoryDatapath,
) -> Vec<Question> {
    let both = before
        .policy
        .keys()
        .filter(|id| after.policy.contains_key(*id));
    let mut found = Vec::new();
    for endpoint in both.copied() {
        // What a pod sends to itself never leaves it.
        let own = after
            .attached
            .get(&endpoint)
            .and_then(|attachment| attachment.ipv4);
        for remote in remotes().filter(|remote| own.map(IpAddr::V4) != Some(*remote)) {
            for (protocol, port) in PORTS.iter().copied() {
                for direction in [EGRESS, INGRESS] {
                    found.push(Question {
                        endpoint,
                        remote,
                        direction,
                        protocol,
                        port,
                    });
                }
            }
        }
    }
    found
}

/// What happens to packets before and after a plan.
pub(in crate::core::tests) struct Ends(Vec<(Question, Fate, Fate)>);

impl Ends {
    pub(in crate::core::tests) fn new(before: &MemoryDatapath, after: &MemoryDatapath) -> Self {
        let ends = questions(before, after).into_iter();
        let ends = ends.filter_map(|q| Some((q, fate(before, q)?, fate(after, q)?)));
        Self(ends.collect())
    }

    /// Checks that a state between is no more open and no more closed than both ends: it neither
    /// passes what is dropped before and after, nor cuts what passes before and after, nor lets
    /// anything bypass the proxy that bypasses it at neither end.
    pub(in crate::core::tests) fn judge(&self, state: &MemoryDatapath, at: &dyn std::fmt::Debug) {
        for (question, was, will) in &self.0 {
            let Some(is) = fate(state, *question) else {
                continue;
            };
            assert!(
                (was.min(will)..=was.max(will)).contains(&&is),
                "{question:?}: {was:?} then {is:?} then {will:?} at {at:?}"
            );
        }
    }
}

/// Checks that every state between two steps is sound.
pub(in crate::core::tests) fn check_way(before: &MemoryDatapath, after: &MemoryDatapath) {
    // A restart begins a new log.
    let goes_on = after.log.starts_with(&before.log);
    let done = if goes_on { before.log.len() } else { 0 };
    let steps = after.log.iter().skip(done);
    let ends = Ends::new(before, after);
    let mut state = MemoryDatapath {
        log: Vec::new(),
        ..before.clone()
    };
    for step in steps {
        state.apply(step).unwrap();
        ends.judge(&state, step);
    }
}

/// A packet of the pod at an address, whatever its endpoint's number.
pub(in crate::core::tests) type Packet = (IpAddr, IpAddr, u8, u8, u16);

/// What happens to every packet in question.
pub(in crate::core::tests) fn fates(datapath: &MemoryDatapath) -> BTreeMap<Packet, Option<Fate>> {
    let questions = questions(datapath, datapath).into_iter();
    let fates = questions.map(|q| {
        let attached = datapath.attached.get(&q.endpoint);
        let own = attached.and_then(|attachment| attachment.ipv4);
        let own = IpAddr::V4(own.expect("its programs are attached"));
        let packet = (own, q.remote, q.direction, q.protocol, q.port);
        (packet, fate(datapath, q))
    });
    fates.collect()
}
