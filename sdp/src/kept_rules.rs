//! Notes for each endpoint with rules in force for which instance the rules were made, and whether
//! the present agent has confirmed them.
//!
//! A Cilium agent that starts sends states without rules until it has regenerated the endpoints,
//! which takes it seconds or minutes. An endpoint that the agent has not named yet keeps its rules
//! while `cilium_lxc` has the instance for which they were made.

use std::collections::{BTreeMap, BTreeSet};

use shared_maps::EndpointId;

use crate::maps::{
    PinnedMaps,
    instances::{Instance, Instances},
};
use dns_policy::table::PolicyHandle;

/// Endpoints whose rules are in force, each with the instance for which the rules were made.
#[derive(Debug, Default)]
pub struct KeptRules {
    /// Endpoints whose rules are in force here, and the instance. An agent can name an endpoint
    /// before `cilium_lxc` has it.
    of: BTreeMap<EndpointId, Option<Instance>>,
    /// Endpoints that the present session has named.
    named: BTreeSet<EndpointId>,
}

impl KeptRules {
    /// Notes that rules of these endpoints are in force, read from a file, or sent by an agent
    /// whose rules were not noted here.
    pub fn adopt(&mut self, endpoints: impl IntoIterator<Item = EndpointId>, now: &Instances) {
        for id in endpoints {
            self.of.entry(id).or_insert_with(|| now.get(&id).cloned());
        }
    }

    /// The session is over: the endpoints that it named count as not confirmed.
    pub fn end_session(&mut self) {
        self.named.clear();
    }

    /// Forgets all endpoints: another kind of agent has replaced all rules, and decides which rules
    /// end.
    pub fn forget(&mut self) {
        self.of.clear();
        self.named.clear();
    }

    /// Takes the endpoints for which a state has rules. Returns the endpoints that the previous
    /// state of this session named and this state does not: their rules end.
    pub fn named(&mut self, now: BTreeSet<EndpointId>) -> Vec<EndpointId> {
        let gone: Vec<_> = self.named.difference(&now).copied().collect();
        for id in &gone {
            self.of.remove(id);
        }
        for id in &now {
            self.of.entry(*id).or_insert(None);
        }
        self.named = now;
        gone
    }

    /// Notes the instances of the endpoints that the present session has named.
    pub fn note_named(&mut self, now: &Instances) {
        for id in &self.named {
            if let Some(present) = now.get(id) {
                self.of.insert(*id, Some(present.clone()));
            }
        }
    }

    /// Compares with the node's endpoints. Returns the endpoints whose rules end because their
    /// instance is gone or was replaced.
    pub fn review(&mut self, now: &Instances) -> Vec<EndpointId> {
        let mut lost = Vec::new();
        for (id, noted) in &mut self.of {
            let present = now.get(id);
            if self.named.contains(id) {
                // The present agent decides to which endpoint these rules belong.
                if present.is_some() {
                    *noted = present.cloned();
                }
                continue;
            }
            let same = match (&noted, present) {
                (Some(noted), Some(present)) => noted.is_same(present),
                _ => false,
            };
            if !same {
                lost.push(*id);
            }
        }
        for id in &lost {
            self.of.remove(id);
        }
        lost
    }

    /// The instance for which an endpoint's rules are in force, if it is known.
    pub fn instance(&self, endpoint: EndpointId) -> Option<&Instance> {
        self.of.get(&endpoint)?.as_ref()
    }

    /// Whether there is anything to look after.
    pub fn is_empty(&self) -> bool {
        self.of.is_empty()
    }

    /// Number of endpoints whose rules the present session has not confirmed.
    pub fn unconfirmed(&self) -> usize {
        self.of.len() - self.named.len()
    }
}

/// Ends the rules of endpoints whose instance is gone. Returns their number.
pub(crate) fn end_rules_of_lost_endpoints(
    kept: &mut KeptRules,
    maps: &PinnedMaps,
    policy: &PolicyHandle,
) -> usize {
    if kept.is_empty() {
        return 0;
    }
    let Some(now) = maps.instances() else {
        return 0;
    };
    let lost = kept.review(&now);
    if !lost.is_empty() {
        tracing::info!(endpoints = ?lost, "rules end with their endpoints");
        policy.apply(&[], &lost);
    }
    lost.len()
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use shared_maps::IdentityId;

    use super::*;

    const WEB: EndpointId = EndpointId(7);

    fn instances(all: &[(u16, u32, u32, u8)]) -> Instances {
        all.iter()
            .map(|(id, ifindex, identity, host)| {
                let mut instance = Instance::new(*ifindex, IdentityId(*identity));
                instance.addresses.insert(IpAddr::from([10, 0, 0, *host]));
                (EndpointId(*id), instance)
            })
            .collect()
    }

    fn after_an_agent() -> KeptRules {
        let mut kept = KeptRules::default();
        assert!(kept.named([WEB].into()).is_empty());
        assert!(kept.review(&instances(&[(7, 12, 300, 7)])).is_empty());
        kept.end_session();
        kept
    }

    #[test]
    fn rules_stay_through_states_without_rules_while_the_instance_does() {
        let mut kept = after_an_agent();
        let same = instances(&[(7, 12, 300, 7), (8, 13, 301, 8)]);
        for _ in 0..3 {
            assert!(kept.named(BTreeSet::new()).is_empty());
            assert!(kept.review(&same).is_empty());
        }
        assert_eq!(kept.unconfirmed(), 1);
        assert!(kept.named([WEB].into()).is_empty());
        assert_eq!(kept.unconfirmed(), 0);
        assert_eq!(kept.named(BTreeSet::new()), [WEB]);
    }

    #[test]
    fn rules_end_with_the_instance() {
        for now in [
            &[][..],
            &[(7, 14, 300, 7)],
            &[(7, 12, 301, 7)],
            &[(7, 12, 300, 9)],
            &[(8, 12, 300, 7)],
        ] {
            let mut kept = after_an_agent();
            assert_eq!(kept.review(&instances(now)), [WEB], "{now:?}");
            assert!(kept.is_empty());
        }
        // If only the agent's tables have the endpoint, its interface is unknown.
        assert!(
            after_an_agent()
                .review(&instances(&[(7, 0, 300, 7)]))
                .is_empty()
        );
    }

    #[test]
    fn an_endpoint_that_was_named_before_the_map_had_it_is_kept_as_the_map_has_it_then() {
        let mut kept = KeptRules::default();
        kept.named([WEB].into());
        assert!(kept.review(&instances(&[])).is_empty());
        assert!(kept.review(&instances(&[(7, 12, 300, 7)])).is_empty());
        kept.end_session();
        assert!(kept.review(&instances(&[(7, 12, 300, 7)])).is_empty());
        assert_eq!(kept.review(&instances(&[(7, 13, 300, 7)])), [WEB]);
    }

    #[test]
    fn rules_of_a_file_are_adopted_once() {
        let mut kept = KeptRules::default();
        kept.adopt([WEB], &instances(&[(7, 12, 300, 7)]));
        kept.adopt([WEB], &instances(&[(7, 13, 300, 7)]));
        assert_eq!(kept.review(&instances(&[(7, 13, 300, 7)])), [WEB]);
    }
}
