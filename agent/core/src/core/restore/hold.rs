//! Endpoints of the last run that a listing with gaps would open: they stay as they were.
//!
//! A policy document that is refused at the start, and of which no good version is known, may be
//! the one that restricts an endpoint. The endpoint's policy map and DNS rules stay those of the
//! last run until the document is read or removed. Policies of other endpoints give addresses new
//! identities meanwhile: for each of these the map gets the entries of the address's former
//! identity. Otherwise packets to an address that a list or a deny of the refused document drops would pass.

use ipnet::IpNet;
use shared_maps::{
    EndpointId, IdentityId,
    policy::{EGRESS, INGRESS, PolicyKey, PolicyValue},
};

use crate::{
    core::{plan::Plan, state::State},
    endpoint::endpoint::{DirtyPeers, Endpoint},
    policy::compute::{entries::Entries, set_order::set_order},
};

impl State {
    /// Lets endpoints follow the listing of policies, which has no gaps any more.
    pub(in crate::core) fn end_hold(&mut self) {
        self.restoration.hold_mut().uncertain = false;
        self.publish_names();
        for id in std::mem::take(&mut self.restoration.hold_mut().held).into_keys() {
            if let Some(endpoint) = self.endpoints.mark_mut(id) {
                endpoint.dirty_peers = DirtyPeers::All;
            }
            self.proxies.publication.mark_stale();
        }
    }

    /// Before the first plan: notes which endpoints it would open.
    pub(in crate::core) fn hold_endpoints(&mut self) {
        let hold = self.restoration.hold_mut();
        let mut former = std::mem::take(&mut hold.former);
        if !hold.uncertain {
            return;
        }
        let opened = self
            .endpoints
            .iter()
            .filter(|endpoint| self.opens(endpoint));
        let held = opened.map(|endpoint| endpoint.id).collect::<Vec<_>>();
        for id in held {
            let rules = former.remove(&id).unwrap_or_default();
            self.restoration.hold_mut().held.insert(id, rules);
            self.proxies.publication.mark_stale();
        }
    }

    /// Before addresses get other identities: for each new identity, kept endpoints' maps get the
    /// entries of the identity that the addresses have. An endpoint whose map has no room for them
    /// is closed.
    pub(in crate::core) fn follow_moves(&mut self, plan: &mut Plan, prefixes: &[IpNet]) {
        let kept: Vec<EndpointId> = self.restoration.hold().held.keys().copied().collect();
        if kept.is_empty() {
            return;
        }
        for prefix in prefixes {
            let Some(metadata) = self.ipcache.get(*prefix) else {
                continue;
            };
            let next = metadata
                .desired
                .filter(|_| metadata.realised != metadata.desired);
            // A pod is left out: it is new, and had no identity whose entries it could keep.
            let Some(next) = next.filter(|next| !next.is_endpoint()) else {
                continue;
            };
            let world = self.world_of(prefix.addr());
            let before = self.ipcache.in_force_at(*prefix).unwrap_or(world);
            for id in &kept {
                self.copy_entries(plan, *id, (before, next));
            }
        }
    }

    /// Gives a kept endpoint's map the entries of one identity for another that it does not know.
    fn copy_entries(
        &mut self,
        plan: &mut Plan,
        id: EndpointId,
        (before, next): (IdentityId, IdentityId),
    ) {
        let Some(map) = self.endpoints.get(id).and_then(|e| e.policy_map.as_ref()) else {
            return;
        };
        let Some(entries) = map.get(before).filter(|_| map.get(next).is_none()) else {
            return;
        };
        if map.len() + entries.len() > self.policy_map_max(id) {
            for direction in [EGRESS, INGRESS] {
                self.close(plan, id, direction);
            }
            return;
        }
        let entries = entries.iter().map(|(key, value)| {
            let sec_label = next.0;
            (PolicyKey { sec_label, ..*key }, *value)
        });
        let mut entries: Vec<(PolicyKey, PolicyValue)> = entries.collect();
        entries.sort_by_key(|(key, value)| (set_order(key, value), *key));
        for (key, value) in entries {
            self.put_policy(plan, id, key, (Some(value), None));
        }
    }

    /// Removes the entries of an identity that is no longer in use from kept endpoints' maps: the
    /// next identity with its number has other labels.
    pub(in crate::core) fn drop_kept_entries(&mut self, plan: &mut Plan, identity: IdentityId) {
        let kept: Vec<EndpointId> = self.restoration.hold().held.keys().copied().collect();
        for id in kept {
            let map = self.endpoints.get(id).and_then(|e| e.policy_map.as_ref());
            let entries = map.and_then(|map| map.get(identity)).cloned();
            for (key, value) in entries.unwrap_or_default() {
                self.put_policy(plan, id, key, (None, Some(value)));
            }
        }
    }

    /// Whether the policy computed now lets pass what the map of the last run does not: a
    /// direction that is not restricted any more, or a deny that is gone.
    fn opens(&self, endpoint: &Endpoint) -> bool {
        let subject = self.policy.subject(endpoint.identity);
        let (Some(subject), Some(map)) = (subject, &endpoint.policy_map) else {
            return false;
        };
        let nothing = Entries::new();
        let wanted = |peer| subject.entries(peer).unwrap_or(&nothing);
        let everyone = IdentityId::UNKNOWN;
        let unrestricted = |direction| {
            let key = PolicyKey::new(everyone.0, direction, 0, 0, 0);
            let allows = |entries: &Entries| entries.get(&key).is_some_and(|v| !v.is_deny());
            allows(wanted(everyone)) && !map.get(everyone).is_some_and(allows)
        };
        let denied_before = map.range(..).flatten().filter(|(_, value)| value.is_deny());
        let mut lifted = denied_before.filter(|(key, _)| {
            let peer = IdentityId(key.sec_label);
            // Names and blocks have no identity yet, so their entries in the datapath count.
            let known = peer == everyone
                || self.policy.labels_of(peer).is_some()
                || self.ipcache.is_in_force(peer);
            known && !wanted(peer).get(key).is_some_and(|value| value.is_deny())
        });
        unrestricted(EGRESS) || unrestricted(INGRESS) || lifted.next().is_some()
    }
}
