//! Endpoints of the last run that a listing with gaps would open: they stay as they were.
//!
//! A policy document that is refused at the start, and of which no good version is known, may be
//! the one that restricts an endpoint. Its policy map and its DNS rules stay those of the last
//! run until the document is read or removed.

use std::{collections::BTreeMap, sync::Arc};

use dns_policy::rule::EndpointRules;
use shared_maps::{
    EndpointId, IdentityId,
    policy::{EGRESS, INGRESS, PolicyKey},
};

use super::state::State;
use crate::{
    endpoint::endpoint::{DirtyPeers, Endpoint},
    policy::compute::Entries,
};

/// Why the policy of an endpoint is not what its documents say.
pub(super) const HELD: &str = "its policy of the last run stays in force: a policy document was \
    refused at the start, and no good version of it is known; correct or remove that document \
    (`policy get` names it)";

/// What is kept back.
#[derive(Debug, Default)]
pub(super) struct Hold {
    /// The first listing of policies has gaps.
    uncertain: bool,
    /// DNS rules that files of the last run have; empty once the sources are synced.
    former: BTreeMap<EndpointId, Arc<EndpointRules>>,
    /// Endpoints that keep what they had, with their DNS rules.
    held: BTreeMap<EndpointId, Arc<EndpointRules>>,
}

impl Hold {
    /// With the DNS rules that the files of the last run have.
    pub(super) fn new(former: BTreeMap<EndpointId, Arc<EndpointRules>>) -> Self {
        Self {
            former,
            ..Self::default()
        }
    }

    /// The first listing of policies has gaps.
    pub(super) fn begin(&mut self) {
        self.uncertain = true;
    }

    /// Whether the listing of policies still has gaps.
    pub(super) fn is_uncertain(&self) -> bool {
        self.uncertain
    }

    /// Whether an endpoint keeps its previous policy.
    pub(super) fn has(&self, id: EndpointId) -> bool {
        self.held.contains_key(&id)
    }

    /// DNS rules of an endpoint that keeps its previous policy.
    pub(super) fn rules_of(&self, id: EndpointId) -> Option<&Arc<EndpointRules>> {
        self.held.get(&id)
    }

    /// Whether no endpoint is kept back.
    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// The endpoint is gone.
    pub(super) fn forget(&mut self, id: EndpointId) {
        self.held.remove(&id);
    }
}

impl State {
    /// The listing of policies has no gaps any more: endpoints follow it.
    pub(super) fn end_hold(&mut self) {
        self.restoration.hold_mut().uncertain = false;
        self.publish_names();
        for id in std::mem::take(&mut self.restoration.hold_mut().held).into_keys() {
            if let Some(endpoint) = self.endpoints.mark_mut(id) {
                endpoint.dirty_peers = DirtyPeers::All;
            }
            self.publication.mark_stale();
        }
    }

    /// Before the first plan: notes which endpoints it would open.
    pub(super) fn hold_endpoints(&mut self) {
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
            self.publication.mark_stale();
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
            // Names and blocks have no identity yet: what the datapath has of them counts.
            let known = peer == everyone
                || self.policy.labels_of(peer).is_some()
                || self.ipcache.is_in_force(peer);
            known && !wanted(peer).get(key).is_some_and(|value| value.is_deny())
        });
        unrestricted(EGRESS) || unrestricted(INGRESS) || lifted.next().is_some()
    }
}
