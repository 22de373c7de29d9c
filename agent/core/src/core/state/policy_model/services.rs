//! Entries of Services: they follow from the entries of the identities behind each.

use std::collections::{BTreeMap, BTreeSet};

use shared_maps::{
    IdentityId,
    policy::{EGRESS, PolicyKey, PolicyValue},
};

use crate::policy::compute::{Observed, entries::Entries, service::Service};

/// Services by identity, and by the identities behind them.
#[derive(Debug, Default)]
pub(crate) struct ServiceTable {
    services: BTreeMap<IdentityId, Service>,
    behind: BTreeMap<IdentityId, BTreeSet<IdentityId>>,
}

impl ServiceTable {
    /// The Service with this identity.
    pub(crate) fn get(&self, id: IdentityId) -> Option<&Service> {
        self.services.get(&id)
    }

    /// Replaces a Service by a new version; `None` removes it. False if nothing changed.
    pub(crate) fn put(&mut self, id: IdentityId, service: Option<Service>) -> bool {
        let before = self.services.get(&id);
        if before == service.as_ref() {
            return false;
        }
        for identity in before.into_iter().flat_map(Service::identities) {
            if let Some(services) = self.behind.get_mut(&identity) {
                services.remove(&id);
                if services.is_empty() {
                    self.behind.remove(&identity);
                }
            }
        }
        let Some(service) = service else {
            self.services.remove(&id);
            return true;
        };
        for identity in service.identities() {
            self.behind.entry(identity).or_default().insert(id);
        }
        self.services.insert(id, service);
        true
    }

    pub(crate) fn behind(&self, identity: IdentityId) -> impl Iterator<Item = IdentityId> {
        self.behind.get(&identity).into_iter().flatten().copied()
    }

    /// Services that a subject may have entries for.
    pub(crate) fn candidates(
        &self,
        entries: &BTreeMap<IdentityId, Entries>,
        observed: Observed,
    ) -> BTreeSet<IdentityId> {
        let everyone = entries.get(&IdentityId::UNKNOWN).into_iter().flatten();
        let mut everyone = everyone.filter(|(key, _)| key.egress == EGRESS);
        let is_narrow =
            |(key, value): (&PolicyKey, &PolicyValue)| key.lpm_len() > 0 || value.is_deny();
        if observed != Observed::Nothing || everyone.any(is_narrow) {
            return self.identities().collect();
        }
        let peers = entries.keys().flat_map(|peer| self.behind(*peer));
        peers.collect()
    }

    pub(crate) fn identities(&self) -> impl Iterator<Item = IdentityId> {
        self.services.keys().copied()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.services.is_empty()
    }
}
