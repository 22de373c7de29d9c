//! The plan of one endpoint's policy map: what it lacks, whether there is room, and the order of the
//! changes.

mod full_map;

use std::collections::BTreeSet;

use shared_maps::{
    EndpointId, IdentityId,
    policy::{EGRESS, PolicyKey, PolicyValue},
};

use crate::{
    core::{
        plan::{Plan, Removals, Undo},
        state::{State, hold::HELD, policy_model::subject::Subject},
    },
    datapath::plan::Step,
    endpoint::{
        endpoint::{DirtyPeers, Endpoint},
        policy_map::PolicyMap,
    },
    policy::compute::{
        entries::Entries,
        set_order::set_order,
        tier::{self, is_of_table},
    },
};

/// What differs between the entries that an endpoint's map has and those that it has to have.
#[derive(Default)]
struct Difference {
    /// Entries to set, each with the value that it replaces.
    sets: Vec<(PolicyKey, PolicyValue, Option<PolicyValue>)>,
    /// Entries that a new table replaces.
    replaced: Vec<(PolicyKey, PolicyValue)>,
    /// Entries to remove at the end of the round.
    unsets: Vec<(PolicyKey, PolicyValue)>,
}

impl Difference {
    fn of(endpoint: &Endpoint, subject: &Subject) -> Self {
        let empty = PolicyMap::default();
        let map = endpoint.policy_map.as_ref().unwrap_or(&empty);
        let peers: BTreeSet<IdentityId> = match &endpoint.dirty_peers {
            DirtyPeers::Some(peers) if endpoint.policy_map.is_some() => peers.clone(),
            _ => map.peers().chain(subject.peers()).collect(),
        };
        let nothing = Entries::new();
        let mut difference = Self::default();
        for peer in peers {
            let wanted = subject.in_map(peer);
            let has = map.get(peer).unwrap_or(&nothing);
            let gets_table = subject.has_tier() && tier::is_table(peer, &wanted);
            difference.add(has, &wanted, gets_table);
        }
        difference
    }

    /// Adds what differs for one peer.
    fn add(&mut self, has: &Entries, wanted: &Entries, gets_table: bool) {
        for (key, value) in wanted {
            let before = has.get(key);
            if before != Some(value) {
                self.sets.push((*key, *value, before.copied()));
            }
        }
        for (key, value) in has.iter().filter(|(key, _)| !wanted.contains_key(key)) {
            match gets_table && key.egress == EGRESS {
                true => self.replaced.push((*key, *value)),
                false => self.unsets.push((*key, *value)),
            }
        }
    }

    /// How many entries the map lacks.
    fn added(&self) -> usize {
        let added = self.sets.iter().filter(|(_, _, before)| before.is_none());
        added.count()
    }

    /// Keys of entries that deny.
    fn denied(&self) -> impl Iterator<Item = &PolicyKey> {
        let denies = self.sets.iter().filter(|(_, value, _)| value.is_deny());
        denies.map(|(key, ..)| key)
    }

    /// The changes in their order: tables, the entries that they replace, the other entries. Each has
    /// the new value and the former one.
    fn in_order(mut self) -> Vec<(PolicyKey, Option<PolicyValue>, Option<PolicyValue>)> {
        self.sets
            .sort_by_key(|(key, value, _)| (set_order(key, value), *key));
        self.replaced.sort_by_key(|(key, _)| (key.prefix_len, *key));
        let tables = self
            .sets
            .partition_point(|(_, value, _)| is_of_table(value));
        let others = self.sets.split_off(tables);
        let set = |(key, value, before)| (key, Some(value), before);
        let replaced = self.replaced.into_iter();
        let replaced = replaced.map(|(key, before)| (key, None, Some(before)));
        let tables = self.sets.into_iter().map(set);
        tables
            .chain(replaced)
            .chain(others.into_iter().map(set))
            .collect()
    }
}

impl State {
    /// Plans the entries that an endpoint's policy map lacks. Removals are left for later.
    pub(in crate::core) fn plan_policy(
        &mut self,
        plan: &mut Plan,
        id: EndpointId,
        removals: &mut Removals,
    ) {
        let Some(is_new) = self.endpoints.get(id).map(|of| of.policy_map.is_none()) else {
            return;
        };
        if !is_new && !self.files.exists(id) {
            self.file(plan, id);
        }
        let Some(endpoint) = self.endpoints.get(id) else {
            return;
        };
        let Some(subject) = self.policy.subject(endpoint.identity) else {
            return;
        };
        let revision = subject.revision();
        if endpoint.dirty_peers.is_none() && !is_new {
            if let Some(endpoint) = self.endpoints.get_mut(id) {
                endpoint.policy_revision = revision;
            }
            return;
        }
        if self.restoration.hold().has(id) && !is_new {
            if let Some(endpoint) = self.endpoints.get_mut(id) {
                endpoint.problem = Some(HELD.to_owned());
            }
            return;
        }
        let difference = Difference::of(endpoint, subject);
        let needed = self.lacks_room(endpoint, &difference);
        if full_map::is_yet_to_close(endpoint, subject)
            || needed.is_some() && full_map::opens_without(endpoint, subject, &difference)
        {
            self.plan_full_map(plan, id, removals);
            return;
        }
        if let Some(needed) = needed {
            self.keep_policy(plan, id, needed);
            return;
        }
        self.make_policy_map(plan, id);
        removals.extend(
            difference
                .unsets
                .iter()
                .map(|(key, value)| (id, *key, *value)),
        );
        for (key, value, before) in difference.in_order() {
            self.put_policy(plan, id, key, (value, before));
        }
        if let Some(endpoint) = self.endpoints.get_mut(id) {
            endpoint.dirty_peers = DirtyPeers::default();
            endpoint.problem = None;
            endpoint.policy_revision = revision;
        }
    }

    /// How many entries a map would need, if it has no room for its new ones.
    fn lacks_room(&self, endpoint: &Endpoint, difference: &Difference) -> Option<usize> {
        let added = difference.added();
        let needed = endpoint.policy_entries() + added;
        (added > 0 && needed > self.policy_map_max(endpoint.id)).then_some(needed)
    }

    /// Notes that a policy does not fit. A map with entries keeps them. A map without entries drops
    /// every packet, and gets no entry for everyone.
    fn keep_policy(&mut self, plan: &mut Plan, id: EndpointId, needed: usize) {
        let is_empty = self.endpoints.get(id).is_none_or(is_empty);
        let meanwhile = match is_empty {
            true => "no packet of it passes",
            false => "the policy before it stays in force",
        };
        let problem = self.no_room(id, needed, meanwhile);
        self.make_policy_map(plan, id);
        if let Some(endpoint) = self.endpoints.get_mut(id) {
            if is_empty {
                endpoint.dirty_peers = DirtyPeers::All;
            }
            endpoint.problem = Some(problem);
        }
    }

    /// Why an endpoint's policy is not in force.
    fn no_room(&self, id: EndpointId, needed: usize, meanwhile: &str) -> String {
        let room = self.policy_map_max(id);
        format!(
            "its policy needs {needed} map entries at once, the map takes {room}: {meanwhile}; use \
             fewer or broader rules (a map keeps the size it was made with: a larger \
             --bpf-policy-map-max is for endpoints added later)"
        )
    }

    /// Plans the map of a new endpoint, after its file.
    fn make_policy_map(&mut self, plan: &mut Plan, id: EndpointId) {
        if self
            .endpoints
            .get(id)
            .is_some_and(|endpoint| endpoint.policy_map.is_some())
        {
            return;
        }
        self.file(plan, id);
        self.step(plan, Step::CreatePolicyMap(id), Undo::CreatedMap(id));
        if let Some(endpoint) = self.endpoints.get_mut(id) {
            endpoint.policy_map.get_or_insert_default();
        }
    }
}

fn is_empty(endpoint: &Endpoint) -> bool {
    endpoint
        .policy_map
        .as_ref()
        .is_none_or(|map| map.len() == 0)
}
