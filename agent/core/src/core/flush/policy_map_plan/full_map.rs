//! A policy map without room for a deny: its endpoint is closed where an entry is missing, and no
//! other endpoint is affected ([`crate::policy::compute::explicit`]).

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
        entries::Entries,
        explicit::{Explicit, passes},
        set_order::{LAST, set_order},
    },
};

const EVERYONE: IdentityId = IdentityId::UNKNOWN;

/// Entries of one identity in one direction, which are set together or not at all.
type Group = Vec<(PolicyKey, PolicyValue, Option<PolicyValue>)>;

fn lets_pass(entries: &Entries, direction: u8) -> bool {
    let mut entries = entries.iter();
    entries.any(|(key, value)| key.egress == direction && passes(value))
}

/// Whether the map lets everyone pass in a direction.
fn is_open(endpoint: &Endpoint, direction: u8) -> bool {
    let map = endpoint.policy_map.as_ref();
    let everyone = map.and_then(|map| map.get(EVERYONE));
    everyone.is_some_and(|entries| lets_pass(entries, direction))
}

/// Whether the map has entries for everyone in a direction in which it shall have none.
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

    /// Plans a map that has no room for its new entries: those that fit. What is missing is closed.
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
        let difference = Difference::of(endpoint, subject);
        let unsets = difference.replaced.iter().chain(&difference.unsets);
        let (mut now, later): (Vec<_>, Vec<_>) = unsets
            .copied()
            .partition(|(key, _)| key.sec_label != EVERYONE.0 && is_closed(key.egress));
        removals.extend(later.into_iter().map(|(key, value)| (id, key, value)));
        now.sort_by_key(|(key, value)| (LAST - set_order(key, value), *key));
        for (key, before) in now {
            self.put_policy(plan, id, key, (None, Some(before)));
        }
        let left = self.set_what_fits(plan, id, difference.sets, is_closed);
        let entries = left.values().sum::<usize>();
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

    /// Makes the policy of an endpoint explicit where an entry for everyone would let pass what a
    /// missing entry denies.
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

    /// Closes a direction at once: entries for everyone that let packets pass go, and one that denies
    /// comes, which is above all others. A deletion needs no room.
    pub(in crate::core) fn close(&mut self, plan: &mut Plan, id: EndpointId, direction: u8) {
        let map = self.endpoints.get(id).and_then(|of| of.policy_map.as_ref());
        let everyone = map.and_then(|map| map.get(EVERYONE)).into_iter().flatten();
        let open = everyone.filter(|(key, value)| key.egress == direction && passes(value));
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

    /// Sets entries as far as the map has room, those of the cluster first. Gives the identities
    /// without room, and how many entries each lacks.
    fn set_what_fits(
        &mut self,
        plan: &mut Plan,
        id: EndpointId,
        sets: Group,
        is_closed: impl Fn(u8) -> bool,
    ) -> BTreeMap<IdentityId, usize> {
        let mut groups: BTreeMap<(bool, IdentityId, u8), Group> = BTreeMap::new();
        for set in sets {
            let peer = IdentityId(set.0.sec_label);
            let is_outside = peer.is_local_scope();
            let group = groups.entry((is_outside, peer, set.0.egress));
            group.or_default().push(set);
        }
        let most = self.policy_map_max(id);
        let mut left = BTreeMap::new();
        for ((_, peer, direction), mut group) in groups {
            let held = self.endpoints.get(id).map_or(0, Endpoint::policy_entries);
            let added = group.iter().filter(|(.., before)| before.is_none()).count();
            if added == 0 || held + added <= most {
                group.sort_by_key(|(key, value, _)| (set_order(key, value), *key));
                for (key, value, before) in group {
                    self.put_policy(plan, id, key, (Some(value), before));
                }
                continue;
            }
            *left.entry(peer).or_default() += group.len();
            if is_closed(direction) {
                self.unset_all(plan, id, peer, direction);
            }
        }
        left
    }

    /// Removes what a map has of an identity in one direction.
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
