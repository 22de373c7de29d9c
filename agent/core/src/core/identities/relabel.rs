//! After a restart: labels before rules.
//!
//! A change of policy begins with three stages ([`crate::core::changes`]): labels of new selectors under
//! the old rules, the rules, removal of labels that no policy uses any more. A policy that changed while
//! the agent was down must go the same way: otherwise an address whose identity changes meets the new
//! policy of its old identity, and is open for a moment although neither policy lets it pass. The old
//! rules are gone, but their verdicts are in the policy maps: an identity that no prefix has yet gets
//! the entries of the identity that its addresses have, if they all have the same one. The end of the
//! grace of restored labels is the third stage.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, HashMap},
};

use ipnet::IpNet;
use shared_maps::{
    EndpointId, IdentityId,
    policy::{PolicyKey, PolicyValue},
};

use crate::{
    core::{flush::CHUNK, plan::Plan, state::State},
    endpoint::endpoint::Endpoint,
    labels::LabelSet,
    policy::compute::{entries::Entries, set_order::set_order},
};

/// An entry of an endpoint's map: the wanted value, and the one in the map.
type Change = (
    EndpointId,
    PolicyKey,
    Option<PolicyValue>,
    Option<PolicyValue>,
);

impl State {
    /// Moves prefixes to their intended identity under the policy in force. This concerns only
    /// prefixes with an identity by labels: endpoints and the node have a fixed one.
    pub(in crate::core) fn relabel(&mut self, plan: &mut Plan) {
        let mapped = |endpoint: &Endpoint| endpoint.policy_map.is_some();
        if !self.endpoints.with_leaving().any(mapped) {
            // No endpoint is under a policy yet.
            return;
        }
        let dirty = self.ipcache.take_dirty();
        let decided_by_labels = |prefix: &IpNet| {
            self.ipcache
                .get(*prefix)
                .is_some_and(|m| !m.is_unclaimed() && m.identity().is_none())
        };
        let (mut moves, rest): (Vec<_>, Vec<_>) = dirty.into_iter().partition(decided_by_labels);
        for prefix in rest {
            self.ipcache.mark(prefix);
        }
        moves.sort_unstable_by_key(|prefix| (u8::MAX - prefix.prefix_len(), *prefix));
        self.drop_contested();
        let takes_over = self.takes_over(&moves);
        let mut given = BTreeSet::new();
        for chunk in moves.chunks(CHUNK) {
            self.relabel_chunk(plan, chunk, &takes_over, &mut given);
        }
    }

    /// For each label set, the identity whose entries it takes over. This is the identity that is in force at the
    /// prefixes of the label set. `None` if these prefixes have different identities.
    fn takes_over(&self, moves: &[IpNet]) -> HashMap<LabelSet, Option<IdentityId>> {
        let mut found = HashMap::new();
        for prefix in moves.iter().copied() {
            let was = Some(self.in_force_at(prefix));
            let one = found.entry(self.ipcache.labels(prefix)).or_insert(was);
            if *one != was {
                *one = None;
            }
        }
        found
    }

    fn relabel_chunk(
        &mut self,
        plan: &mut Plan,
        chunk: &[IpNet],
        takes_over: &HashMap<LabelSet, Option<IdentityId>>,
        given: &mut BTreeSet<IdentityId>,
    ) {
        let had: BTreeSet<IdentityId> = chunk
            .iter()
            .filter_map(|prefix| self.ipcache.get(*prefix)?.realised)
            .collect();
        for prefix in chunk {
            self.resolve(*prefix);
        }
        self.checkpoint(plan);
        let left = self.give_policy(plan, chunk, takes_over, given);
        let (mut ready, mut later) = (Vec::new(), Vec::new());
        for prefix in chunk.iter().copied() {
            match self.ipcache.get(prefix).and_then(|m| m.desired) {
                Some(wanted) if left.contains(&wanted) => later.push(prefix),
                Some(_) => ready.push(prefix),
                None => {}
            }
        }
        self.plan_ipcache(plan, &ready);
        for prefix in later {
            self.ipcache.mark(prefix);
        }
        let gone = had
            .into_iter()
            .filter(|id| !self.ipcache.is_in_force(*id) && self.policy.labels_of(*id).is_none());
        for id in gone.collect::<Vec<_>>() {
            self.drop_policy(plan, id);
        }
    }

    /// If prefixes with different labels request one number, none of them gets it. If prefixes with one label set
    /// request several numbers, the label set gets none of these. Otherwise one prefix would for a moment have the
    /// access of another.
    fn drop_contested(&mut self) {
        let mut asking: BTreeMap<IdentityId, Option<LabelSet>> = BTreeMap::new();
        let mut asked: HashMap<LabelSet, Option<IdentityId>> = HashMap::new();
        for (prefix, id) in self.restoration.requests() {
            let labels = self.ipcache.labels(prefix);
            let number = asked.entry(labels.clone()).or_insert(Some(id));
            if *number != Some(id) {
                *number = None;
            }
            let one = asking.entry(id).or_insert_with(|| Some(labels.clone()));
            if one.as_ref() != Some(&labels) {
                *one = None;
            }
        }
        let agreed = |id: IdentityId| {
            let labels = asking.get(&id)?.as_ref()?;
            asked.get(labels).copied().flatten()
        };
        self.restoration.retain_requests(|id| agreed(id).is_some());
    }

    /// Gives identities that come into force the entries of the identity that they take over from. An identity that
    /// takes over from several identities gets the entries of the new policy, because each of the former identities may
    /// have other access. Each prefix then comes under the new policy with one write. Returns the identities whose
    /// entries would not fit: their prefixes move with the new policy.
    fn give_policy(
        &mut self,
        plan: &mut Plan,
        chunk: &[IpNet],
        takes_over: &HashMap<LabelSet, Option<IdentityId>>,
        given: &mut BTreeSet<IdentityId>,
    ) -> BTreeSet<IdentityId> {
        let mut coming: BTreeMap<IdentityId, Option<IdentityId>> = BTreeMap::new();
        for prefix in chunk.iter().copied() {
            let Some(metadata) = self.ipcache.get(prefix) else {
                continue;
            };
            let wanted = metadata.desired.filter(|id| metadata.realised != Some(*id));
            let Some(wanted) = wanted.filter(|id| !self.ipcache.is_in_force(*id)) else {
                continue;
            };
            // Partial labels (of the circuit breaker) take over no earlier identity.
            let was = takes_over.get(&self.ipcache.labels(prefix));
            coming.insert(wanted, was.copied().flatten());
        }
        let mut left = BTreeSet::new();
        for (wanted, was) in coming {
            if given.contains(&wanted) {
                continue;
            }
            match self.taken_over(wanted, was) {
                Some(changes) => {
                    self.plan_taken_over(plan, changes);
                    given.insert(wanted);
                }
                None => {
                    left.insert(wanted);
                }
            }
        }
        left
    }

    /// Removes the entries of an identity that no prefix has and nothing asks for.
    fn drop_policy(&mut self, plan: &mut Plan, id: IdentityId) {
        let mut changes = Vec::new();
        for endpoint in self.endpoints.with_leaving() {
            let entries = endpoint.policy_map.iter().filter_map(|map| map.get(id));
            changes.extend(
                entries
                    .flatten()
                    .map(|(key, old)| (endpoint.id, *key, None, Some(*old))),
            );
        }
        // In the reverse of the order in which entries are set.
        changes.sort_by_key(|(id, key, _, old): &Change| {
            let order = old.as_ref().map(|old| set_order(key, old));
            (*id, std::cmp::Reverse(order), *key)
        });
        self.plan_taken_over(plan, changes);
    }

    fn in_force_at(&self, prefix: IpNet) -> IdentityId {
        let world = self.world_of(prefix.addr());
        self.ipcache.in_force_at(prefix).unwrap_or(world)
    }

    /// What has to change for `wanted` to have the policy of `was`, or the new one if `was` is
    /// `None`. Gives `None` if a map has no room for it.
    fn taken_over(&self, wanted: IdentityId, was: Option<IdentityId>) -> Option<Vec<Change>> {
        let nothing = Entries::new();
        let mut changes = Vec::new();
        for endpoint in self.endpoints.with_leaving() {
            let Some(map) = &endpoint.policy_map else {
                continue;
            };
            let has = map.get(wanted).unwrap_or(&nothing);
            let source = match was {
                Some(was) => map.get(was).map(Cow::Borrowed),
                None => self
                    .policy
                    .subject(endpoint.identity)
                    .map(|subject| subject.in_map(wanted)),
            };
            let shall: Entries = source
                .iter()
                .flat_map(|entries| entries.iter())
                .map(|(key, value)| (of_identity(key, wanted), *value))
                .collect();
            // A run that was killed, or a selector without addresses, left these entries.
            let gone = has.iter().filter(|(key, _)| !shall.contains_key(key));
            changes.extend(gone.map(|(key, old)| (endpoint.id, *key, None, Some(*old))));
            let mut added = 0;
            for (key, value) in &shall {
                let old = has.get(key);
                added += usize::from(old.is_none());
                if old != Some(value) {
                    changes.push((endpoint.id, *key, Some(*value), old.copied()));
                }
            }
            if endpoint.policy_entries() + added > self.policy_map_max(endpoint.id) {
                return None;
            }
        }
        changes.sort_by_key(|(id, key, value, _)| {
            let order = value.as_ref().map(|value| set_order(key, value));
            (*id, order, *key)
        });
        Some(changes)
    }

    fn plan_taken_over(&mut self, plan: &mut Plan, changes: Vec<Change>) {
        for (id, key, value, old) in changes {
            self.put_policy(plan, id, key, (value, old));
        }
    }
}

fn of_identity(key: &PolicyKey, identity: IdentityId) -> PolicyKey {
    PolicyKey {
        sec_label: identity.0,
        ..*key
    }
}
