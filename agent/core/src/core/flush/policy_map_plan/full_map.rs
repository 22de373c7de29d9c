//! A policy map without room for a deny. Where an entry is missing, its endpoint is closed. No other endpoint is
//! affected ([`crate::policy::compute::explicit`]).

use std::collections::BTreeMap;

use shared_maps::{
    EndpointId, IdentityId,
    policy::{EGRESS, INGRESS, PolicyKey, PolicyValue},
};

use super::Difference;
use crate::{
    core::{
        plan::{Plan, Removals},
        state::{State, policy_model::subject::Subject},
    },
    endpoint::endpoint::{DirtyPeers, Endpoint},
    policy::compute::{
        explicit::{Explicit, lets_pass},
        set_order::{LAST, set_order},
    },
};

const EVERYONE: IdentityId = IdentityId::UNKNOWN;

/// What differs for one identity in one direction: either all of it is put, or nothing.
#[derive(Default)]
struct Group {
    sets: Vec<(PolicyKey, PolicyValue, Option<PolicyValue>)>,
    unsets: Vec<(PolicyKey, PolicyValue)>,
}

/// Whether the identity is one of addresses outside the cluster, its number, and the direction:
/// identities of the cluster come first.
type GroupKey = (bool, IdentityId, u8);

fn groups(difference: Difference) -> BTreeMap<GroupKey, Group> {
    let mut groups: BTreeMap<GroupKey, Group> = BTreeMap::new();
    let key = |key: &PolicyKey| {
        let peer = IdentityId(key.sec_label);
        (peer.is_local_scope(), peer, key.egress)
    };
    for set in difference.sets {
        groups.entry(key(&set.0)).or_default().sets.push(set);
    }
    for unset in difference.replaced.into_iter().chain(difference.unsets) {
        groups.entry(key(&unset.0)).or_default().unsets.push(unset);
    }
    for group in groups.values_mut() {
        let order = |(key, value, _): &(PolicyKey, PolicyValue, _)| (set_order(key, value), *key);
        group.sets.sort_by_key(order);
        let unsets = &mut group.unsets;
        unsets.sort_by_key(|(key, value)| (LAST - set_order(key, value), *key));
    }
    groups
}

/// Whether the map has an entry that lets packets of every peer pass in a direction.
fn is_open(endpoint: &Endpoint, direction: u8) -> bool {
    let map = endpoint.policy_map.as_ref();
    let everyone = map.and_then(|map| map.get(EVERYONE));
    everyone.is_some_and(|entries| lets_pass(entries, direction))
}

/// Whether the map has entries for everyone in a direction in which it must have none.
pub(super) fn is_yet_to_close(endpoint: &Endpoint, subject: &Subject) -> bool {
    let explicit = subject.explicit();
    [EGRESS, INGRESS]
        .into_iter()
        .any(|direction| explicit.is_in(direction) && is_open(endpoint, direction))
}

/// Whether a packet that the policy denies may pass if the new entries are missing.
pub(super) fn opens_without(
    endpoint: &Endpoint,
    subject: &Subject,
    difference: &Difference,
) -> bool {
    if subject.explicit().is_anywhere() {
        return true;
    }
    let everyone = subject.in_map(EVERYONE);
    let may_pass =
        |key: &PolicyKey| is_open(endpoint, key.egress) || lets_pass(&everyone, key.egress);
    difference.denied().any(may_pass)
}

impl State {
    /// Gives maps their usual form again where it may fit.
    pub(in crate::core) fn end_explicit(&mut self) {
        for identity in self.policy.may_end_explicit() {
            self.policy.end_explicit(identity);
            self.mark_subject(identity);
        }
    }

    fn mark_subject(&mut self, identity: IdentityId) {
        let subject = self.policy.subject(identity).into_iter();
        for id in subject.flat_map(Subject::endpoints) {
            if let Some(endpoint) = self.endpoints.mark_mut(*id) {
                endpoint.dirty_peers = DirtyPeers::All;
                endpoint.problem = None;
            }
        }
    }

    /// For a map without room for all its new entries, plans those that fit. An identity without
    /// entries is closed.
    pub(super) fn plan_full_map(
        &mut self,
        plan: &mut Plan,
        id: EndpointId,
        removals: &mut Removals,
    ) {
        self.make_explicit(id);
        self.make_policy_map(plan, id);
        let Some((endpoint, subject)) = self.with_subject(id) else {
            return;
        };
        let revision = subject.revision();
        let wanted = subject.in_map(EVERYONE);
        let [egress, ingress] = [EGRESS, INGRESS].map(|direction| !lets_pass(&wanted, direction));
        let is_closed = |direction: u8| if direction == EGRESS { egress } else { ingress };
        let still_open = [EGRESS, INGRESS]
            .into_iter()
            .filter(|direction| is_closed(*direction) && is_open(endpoint, *direction));
        for direction in still_open.collect::<Vec<_>>() {
            self.close(plan, id, direction);
        }
        let Some((endpoint, subject)) = self.with_subject(id) else {
            return;
        };
        let groups = groups(Difference::of(endpoint, subject));
        let mut left = BTreeMap::new();
        // Removals make room for new entries.
        let (comes, goes): (Vec<_>, Vec<_>) = groups
            .into_iter()
            .partition(|(_, group)| !group.sets.is_empty());
        for ((_, peer, direction), group) in goes.into_iter().chain(comes) {
            let keeps_removals = peer == EVERYONE || !is_closed(direction);
            let lacks = self.put_group(plan, id, (peer, direction), &group, keeps_removals);
            if let Some(lacks) = lacks {
                *left.entry(peer).or_default() += lacks;
            }
            if keeps_removals {
                let unsets = group.unsets.into_iter();
                removals.extend(unsets.map(|(key, value)| (id, key, value)));
            }
        }
        let entries: usize = left.values().sum();
        let held = self.endpoints.get(id).map_or(0, Endpoint::policy_entries);
        let problem = (entries > 0).then(|| {
            let meanwhile = format!(
                "{} identities without an entry are closed to it",
                left.len()
            );
            self.no_room(id, held + entries, &meanwhile)
        });
        if let Some(endpoint) = self.endpoints.get_mut(id) {
            endpoint.dirty_peers = DirtyPeers::Some(left.into_keys().collect());
            if problem.is_none() {
                endpoint.policy_revision = revision;
            }
            endpoint.problem = problem;
        }
    }

    fn with_subject(&self, id: EndpointId) -> Option<(&Endpoint, &Subject)> {
        let endpoint = self.endpoints.get(id)?;
        Some((endpoint, self.policy.subject(endpoint.identity)?))
    }

    /// Makes the policy of an endpoint explicit in the directions in which an entry for every peer would let packets
    /// pass that a missing entry has to deny.
    fn make_explicit(&mut self, id: EndpointId) {
        let Some((endpoint, subject)) = self.with_subject(id) else {
            return;
        };
        let identity = endpoint.identity;
        let difference = Difference::of(endpoint, subject);
        let directions = Explicit::for_denied(difference.denied(), subject.rules.everyone());
        if subject.explicit().or(directions) != subject.explicit() {
            self.policy.make_explicit(identity, directions);
            self.mark_subject(identity);
        }
    }

    /// Closes a direction at once: removes the entries for everyone that let packets pass, and sets one
    /// that denies, above all others. The removal makes room for it.
    pub(in crate::core) fn close(&mut self, plan: &mut Plan, id: EndpointId, direction: u8) {
        let map = self.endpoints.get(id).and_then(|of| of.policy_map.as_ref());
        let everyone = map.and_then(|map| map.get(EVERYONE)).into_iter().flatten();
        let open = everyone.filter(|(key, value)| key.egress == direction && !value.is_deny());
        let open: Vec<_> = open.map(|(key, value)| (*key, *value)).collect();
        if open.is_empty() {
            return;
        }
        for (key, before) in open {
            self.put_policy(plan, id, key, (None, Some(before)));
        }
        let all = PolicyKey::new(EVERYONE.0, direction, 0, 0, 0);
        let deny = (Some(PolicyValue::deny(all)), None);
        self.put_policy(plan, id, all, deny);
        if let Some(endpoint) = self.endpoints.get_mut(id) {
            endpoint.dirty_peers.add([EVERYONE]);
        }
    }

    /// Puts the entries of an identity in one direction. The new ones are set before the old ones are
    /// removed, or after it if there is no room for both. If the new ones have no room at all, the map
    /// gets none of them, and their number is returned. Removals that are kept for later are left
    /// alone.
    fn put_group(
        &mut self,
        plan: &mut Plan,
        id: EndpointId,
        (peer, direction): (IdentityId, u8),
        group: &Group,
        keeps_removals: bool,
    ) -> Option<usize> {
        let added = group.sets.iter().filter(|(.., before)| before.is_none());
        let fits = |state: &Self, added: usize| {
            let held = state.endpoints.get(id).map_or(0, Endpoint::policy_entries);
            added == 0 || held + added <= state.policy_map_max(id)
        };
        if fits(self, added.count()) {
            for (key, value, before) in &group.sets {
                self.put_policy(plan, id, *key, (Some(*value), *before));
            }
            if !keeps_removals {
                for (key, before) in &group.unsets {
                    self.put_policy(plan, id, *key, (None, Some(*before)));
                }
            }
            return None;
        }
        if keeps_removals {
            return Some(group.sets.len());
        }
        self.unset_all(plan, id, peer, direction);
        let (_, subject) = self.with_subject(id)?;
        let entries = subject.in_map(peer).into_owned().into_iter();
        let mut entries: Vec<_> = entries.filter(|(key, _)| key.egress == direction).collect();
        if !fits(self, entries.len()) {
            return Some(entries.len());
        }
        entries.sort_by_key(|(key, value)| (set_order(key, value), *key));
        for (key, value) in entries {
            self.put_policy(plan, id, key, (Some(value), None));
        }
        None
    }

    /// Removes the entries that a map has for an identity in one direction.
    fn unset_all(&mut self, plan: &mut Plan, id: EndpointId, peer: IdentityId, direction: u8) {
        let map = self.endpoints.get(id).and_then(|of| of.policy_map.as_ref());
        let entries = map.and_then(|map| map.get(peer)).into_iter().flatten();
        let entries = entries.filter(|(key, _)| key.egress == direction);
        let mut entries: Vec<_> = entries.map(|(key, value)| (*key, *value)).collect();
        entries.sort_by_key(|(key, value)| (LAST - set_order(key, value), *key));
        for (key, before) in entries {
            self.put_policy(plan, id, key, (None, Some(before)));
        }
    }
}
